"""max/avg over windows, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measures.balance import Series, max_over_avg, mean_max_over_avg, overall_max_over_avg

#: Gains of (a, b, c): (2, 1, 0), (3, 3, 3), (0, 0, 0).
SERIES = Series([0.0, 1.0, 2.0, 3.0], {"a": [10, 12, 15, 15], "b": [0, 1, 4, 4], "c": [5, 5, 8, 8]})


def test_mean_over_windows() -> None:
    assert SERIES.increments()[0] == {"a": 2, "b": 1, "c": 0}
    assert [max_over_avg(window) for window in SERIES.increments()] == [2.0, 1.0, None]
    assert mean_max_over_avg(SERIES) == 1.5  # the last window has no load


def test_over_the_whole_series() -> None:
    assert overall_max_over_avg(SERIES) == pytest.approx(5 / 4)  # gains of 5, 4, 3


def test_a_part_of_it() -> None:
    part = SERIES.between(1.0, 2.5)
    assert part.times == [1.0, 2.0]
    assert mean_max_over_avg(part) == 1.0
    assert mean_max_over_avg(SERIES.between(0.5, 1.5)) is None
    assert overall_max_over_avg(SERIES.between(0.5, 1.5)) is None


def test_longer_windows() -> None:
    times = [0.0, 1.0, 1.95, 3.0, 4.0, 4.2]
    series = Series(times, {"a": [0, 1, 2, 3, 4, 5], "b": [0, 3, 3, 3, 3, 3]})
    assert series.thinned(2.0).times == [0.0, 1.95, 4.0]  # 1.95 is a sample that came a little early
    assert series.thinned(2.0).increments() == [{"a": 2, "b": 3}, {"a": 2, "b": 0}]
    assert series.thinned(0.1).times == times


def test_a_process_that_started_anew() -> None:
    assert Series([0.0, 1.0], {"a": [100.0, 3.0], "b": [0.0, 1.0]}).increments() == [{"a": 3.0, "b": 1.0}]


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), min_size=1, max_size=8))
def test_between_even_and_all_on_one(loads: dict[str, float]) -> None:
    ratio = max_over_avg(loads)
    if ratio is not None:
        assert 1 - 1e-9 <= ratio <= len(loads) + 1e-9
