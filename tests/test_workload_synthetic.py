"""Synthetic trajectories: all columns of the paper's Table 2 at once, and what follows from them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.workload.hits import pooled
from common.workload.synthetic import SET_SIZE, describe, generate
from common.workload.table2 import TABLE2, Columns, fit_table, measure
from common.workload.trajectories import Trajectory, Turn


@pytest.mark.parametrize("seed", [0, 1, 2026])
@pytest.mark.parametrize("set_name", ["32K", "48K", "64K"])
def test_every_column_is_within_one_percent(set_name: str, seed: int) -> None:
    trajectories = generate(set_name, seed=seed)
    assert len(trajectories) == SET_SIZE == 500
    for comparison in fit_table(trajectories, TABLE2[set_name]):
        assert abs(comparison.difference_percent) < 1, comparison


def test_the_table_is_the_papers() -> None:
    assert TABLE2["64K"] == Columns(65_536, 157, 429, 176, 55_958, 32_721)
    assert TABLE2["48K"] == Columns(49_152, 106, 474, 172, 42_607, 25_120)
    assert TABLE2["32K"] == Columns(32_768, 60, 608, 148, 28_639, 17_183)


def test_pooled_over_turns_64k_is_what_the_columns_imply() -> None:
    """284 miss, 105 generated and 32.4K hit tokens a turn: far from the columns' own 429 and 176."""
    means = pooled(generate("64K"))
    assert means.miss == pytest.approx(284, rel=0.01)
    assert means.generate == pytest.approx(105, rel=0.02)
    assert means.hit == pytest.approx(32_437, rel=0.01)


def test_columns_are_means_of_means() -> None:
    """By hand. a: prompts 10 and 30; b: one prompt of 100."""
    a = Trajectory("a", (Turn(0, 10, 2), Turn(12, 18, 4)))
    b = Trajectory("b", (Turn(0, 100, 5),))
    assert measure([a, b]) == Columns(max_length=105, turns=1.5, append=57, generate=4, total=69.5, context=60)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(TABLE2)), st.integers(1, 40), st.integers(0, 1000))
def test_any_draw_is_whole_and_within_max_length(set_name: str, count: int, seed: int) -> None:
    trajectories = generate(set_name, count, seed)
    assert len({trajectory.name for trajectory in trajectories}) == len(trajectories) == count
    for trajectory in trajectories:
        assert trajectory.peak <= TABLE2[set_name].max_length
        assert trajectory.prefix == 0
        assert all(after.context == before.total for before, after in pairwise(trajectory.turns))


def test_the_seed_decides() -> None:
    assert generate("48K", 50, seed=3) == generate("48K", 50, seed=3)
    assert [t.turns for t in generate("48K", 50, seed=3)] != [t.turns for t in generate("48K", 50, seed=4)]


def test_growth_is_front_loaded_by_appends_alone() -> None:
    long = [trajectory.turns for trajectory in generate("64K") if len(trajectory.turns) >= 100]
    first = [turn for turns in long for turn in turns[: len(turns) // 4]]
    last = [turn for turns in long for turn in turns[-(len(turns) // 4) :]]
    assert sum(t.append for t in first) > 1.5 * sum(t.append for t in last)
    assert sum(t.generate for t in first) == pytest.approx(sum(t.generate for t in last), rel=0.05)


def test_turns_and_totals_do_not_correlate() -> None:
    trajectories = generate("64K")
    middle = sorted(len(t.turns) for t in trajectories)[250]
    short = [t.peak for t in trajectories if len(t.turns) < middle]
    long = [t.peak for t in trajectories if len(t.turns) > middle]
    assert sum(short) / len(short) == pytest.approx(sum(long) / len(long), rel=0.01)


def test_description_states_the_choices_and_the_fit() -> None:
    described = describe("64K", generate("64K"))
    assert [row["column"] for row in described["fit"]] == [
        "max_length", "turns", "append", "generate", "total", "context",
    ]  # fmt: skip
    assert described["fit"][2]["target"] == 429
    assert "lognormal" in described["choices"]
    assert described["parameters"]["growth"] == pytest.approx(0.717, abs=0.001)
    assert described["longest_turns"] == 1142


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trajectory set '16K': choose one of 32K, 48K, 64K"):
        generate("16K")
