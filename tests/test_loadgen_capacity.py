"""The search for the largest rate, and when a run counts as having met its objectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measures.capacity import Search, is_stationary, last_windows, verdict
from loadgen.measures.turns import RunLog, Slo, TurnRecord

SLO = Slo(ttft_s=4.0, tpot_s=0.05)


def turn(intended: float, ttft: float | None, tpot: float = 0.02, failure: str | None = None) -> TurnRecord:
    times = [] if ttft is None else [intended + ttft + tpot * index for index in range(11)]
    return TurnRecord("s", 0, intended, intended, intended + 10, 100, 11, times, failure=failure)


def log_of(turns: list[TurnRecord], cut: list[TurnRecord] | None = None) -> RunLog:
    return RunLog(len(turns), started=0.0, ended=40.0, last_start=30.0, turns=turns, cut=cut or [])


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 0.2))
def test_search_finds_the_edge_of_a_monotone_function(edge: float, start: float, tolerance: float) -> None:
    search = Search(start, tolerance, trials=200)
    while not search.done:
        search.tell(search.rate <= edge)
    assert search.met is not None and search.failed is not None
    assert search.met <= edge < search.failed <= search.met * (1 + tolerance) * (1 + 1e-9)


@given(st.floats(0.01, 100), st.integers(1, 6))
def test_search_ends_when_trials_are_used_up(edge: float, trials: int) -> None:
    search = Search(1.0, 1e-9, trials)
    while not search.done:
        search.tell(search.rate <= edge)
    assert len(search.tried) == trials
    assert search.met is None or search.met <= edge


def test_last_windows_are_thirds_of_the_arrivals() -> None:
    turns = [turn(at, 1.0) for at in (5.0, 12.0, 20.0, 20.1, 30.0, 31.0)]
    before, last = last_windows(log_of(turns))
    assert [t.intended for t in before] == [12.0, 20.0]
    assert [t.intended for t in last] == [20.1, 30.0]  # 31: after the last arrival


@pytest.mark.parametrize(("earlier", "later", "stationary"), [
    (2.0, 2.85, True),    # 2.0 * 1.25 + 0.4 = 2.9
    (2.0, 2.95, False),
    (0.1, 0.52, True),    # 0.125 + 0.4: noise of short times is let pass
    (0.1, 0.53, False),
    (3.0, 1.0, True),
])
def test_stationary(earlier: float, later: float, stationary: bool) -> None:
    assert is_stationary([turn(0, earlier)], [turn(20, later)], Slo()) is stationary


def test_a_turn_without_a_first_token_is_not_stationary() -> None:
    assert not is_stationary([turn(0, 1.0)], [turn(20, 1.0), turn(25, None)], Slo())
    assert not is_stationary([], [turn(20, 1.0)], Slo())


def test_met() -> None:
    steady = [turn(at, 1.0) for at in range(10, 31)]
    assert verdict(log_of(steady), SLO, given_up=False)["met"]
    assert not verdict(log_of(steady), SLO, given_up=True)["met"]


def test_not_met_for_the_99th_percentile_of_ttft() -> None:
    one_late = [turn(at, 1.0) for at in range(10, 30)] + [turn(30, 4.5)]
    told = verdict(log_of(one_late), SLO, given_up=False)
    assert told["window_ttft_s"]["p99"] == 4.5
    assert not told["within_slo"]


def test_not_met_for_mean_tpot() -> None:
    slow = [turn(at, 1.0, tpot=0.051) for at in range(10, 31)]
    assert not verdict(log_of(slow), SLO, given_up=False)["within_slo"]


def test_turns_that_were_cut_at_the_end_count() -> None:
    steady = [turn(at, 1.0) for at in range(10, 31)]
    assert verdict(log_of(steady, [turn(29, 2.0)]), SLO, given_up=False)["met"]
    assert not verdict(log_of(steady, [turn(29, None)]), SLO, given_up=False)["met"]
