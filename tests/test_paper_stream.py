"""Windows of a workload in which every turn is as likely as any other."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.perf.bounds import Turn
from common.workload.hits import pooled
from common.workload.scaling import Selection, fit
from common.workload.trajectories import Trajectory
from common.workload.trajectories import Turn as Step
from loadgen.simulator.steady import Stream, get_stream
from loadgen.workload.source import Played, Source


def stream(lengths: list[int], turns: int) -> Stream:
    """Of trajectories with so many turns, each of which appends 64 tokens and generates 64."""
    made = []
    for index, length in enumerate(lengths):
        steps = tuple(Step(128 * i, 64, 64) for i in range(length))
        made.append(Trajectory(f"t{index}", steps))
    played = Played(Source(), fit(made, Selection(), None), tuple(made))
    return Stream(played, turns, Turn(1, 1, 1), sum(lengths) / len(lengths), 1.0, 1, seed=0)


def test_by_hand() -> None:
    """A trajectory of 3 turns has 4 windows of up to 2: its first turn, 1-2, 2-3, and its last one: 6 turns in all."""
    shown = stream([3], 2)
    assert shown.mean_window == 6 / 4
    windows = shown.windows(4)
    assert sorted((part.prefix, len(part.turns)) for part in windows) == [(0, 1), (0, 2), (128, 2), (256, 1)]
    assert len({part.name for part in shown.windows(9)}) == 9, "no two share text, also of the same turns"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_every_turn_is_as_likely_as_any_other(lengths: list[int], turns: int) -> None:
    shown = stream(lengths, turns)
    windows = shown.windows(sum(lengths) + len(lengths) * (turns - 1))  # each once
    played = Counter((part.name.split("@")[0], turn.context) for part in windows for turn in part.turns)
    assert set(played.values()) == {turns} and len(played) == sum(lengths)
    assert shown.mean_window == pytest.approx(sum(len(part.turns) for part in windows) / len(windows))


def test_a_few_windows_are_like_the_whole_set() -> None:
    shown = get_stream(Source(), 99_000, 4)
    mean, part = shown.mean_turn, pooled(shown.windows(800))
    assert (part.hit, part.miss, part.generate) == pytest.approx((mean.hit, mean.miss, mean.generated), rel=0.04)
    assert shown.windows(50) == shown.windows(50)
