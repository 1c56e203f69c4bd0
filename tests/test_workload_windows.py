"""Hits inside a trajectory, windows at native context, more trajectories, gaps."""

from __future__ import annotations

import math
from statistics import pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.workload.extend import FIRST, extend
from common.workload.gaps import GapKind, Gaps, with_gaps
from common.workload.hits import Pooled, hit_tokens, hits, pooled
from common.workload.scaling import cut, scaled, stretched
from common.workload.synthetic import generate
from common.workload.trajectories import Trajectory, Turn
from common.workload.windows import beginnings, window, windows

#: Histories: 74, 138, 145; the last turn falls back to 70.
BRANCHED = Trajectory("b", (Turn(0, 64, 10), Turn(74, 54, 10, 2.0), Turn(138, 6, 1, 3.0), Turn(70, 9, 3, 4.0)))


@pytest.fixture(scope="module")
def set_64k() -> list[Trajectory]:
    return generate("64K")


@pytest.mark.parametrize(
    ("turn", "stored", "hit"),
    [
        (Turn(0, 1000, 1), 0, 0),
        (Turn(63, 10, 1), 62, 0),
        (Turn(64, 1, 1), 64, 64),
        (Turn(65, 10, 1), 64, 64),
        (Turn(64, 10, 1), 63, 0),       # the history's last token was generated, but its KV never computed
        (Turn(130, 10, 1), 200, 128),   # a fall-back shares 130 tokens of what is stored
    ],
)
def test_hit_is_whole_stored_shared_blocks(turn: Turn, stored: int, hit: int) -> None:
    assert hit_tokens(turn, stored) == hit


def test_hits_of_a_trajectory_by_hand() -> None:
    assert hits(BRANCHED) == [0, 64, 128, 64]
    assert hits(BRANCHED, block=10) == [0, 70, 130, 70]
    assert pooled([BRANCHED]) == Pooled(4, 256 / 4, (64 + 64 + 16 + 15) / 4, 24 / 4)
    with pytest.raises(ValueError, match="no turn"):
        pooled([])


def test_a_window_goes_on_from_its_stored_prefix() -> None:
    part = window(BRANCHED, 1, 2)
    assert part == Trajectory("b@1", (Turn(74, 54, 10, 2.0), Turn(138, 6, 1, 3.0)), prefix=74)
    assert hits(part) == hits(BRANCHED)[1:3]
    assert window(BRANCHED, 3, 1).prefix == 70, "of a longer history only what the first turn shares"
    assert cut(part, 140).turns == part.turns[:1]
    assert cut(part, 140).prefix == 74


@pytest.mark.parametrize(("start", "turns"), [(-1, 2), (3, 2), (4, 1), (0, 0)])
def test_no_such_window(start: int, turns: int) -> None:
    with pytest.raises(ValueError, match="has no turns"):
        window(BRANCHED, start, turns)


def test_prefix_bounds_the_first_context() -> None:
    with pytest.raises(ValueError, match="does not follow a history of 9"):
        Trajectory("x", (Turn(10, 1, 1),), prefix=9)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("count", "turns"), [(8, 8), (24, 6), (64, 4)])
def test_windows_stand_for_the_set(set_64k: list[Trajectory], count: int, turns: int, seed: int) -> None:
    chosen = windows(set_64k, count, turns, seed)
    assert len({part.name for part in chosen}) == count
    assert {len(part.turns) for part in chosen} == {turns}
    whole, part = pooled(set_64k), pooled(chosen)
    assert part.hit == pytest.approx(whole.hit, rel=0.002)
    assert part.miss == pytest.approx(whole.miss, rel=0.08)
    assert part.generate == pytest.approx(whole.generate, rel=0.08)
    everywhere = pstdev(turn.context for t in set_64k for turn in t.turns)
    assert pstdev(part.prefix for part in chosen) == pytest.approx(everywhere, rel=0.25), "agents at all phases"


def test_windows_repeat_with_the_seed_only(set_64k: list[Trajectory]) -> None:
    assert windows(set_64k, 16, 5, seed=1) == windows(set_64k, 16, 5, seed=1)
    assert windows(set_64k, 16, 5, seed=1) != windows(set_64k, 16, 5, seed=2)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_windows_never_repeat(data: st.DataObject) -> None:
    trajectories = generate("32K", data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99)))
    turns = data.draw(st.integers(1, 30))
    possible = sum(max(0, len(t.turns) - turns + 1) for t in trajectories)
    count = data.draw(st.integers(1, possible + 1))
    if count > possible:
        with pytest.raises(ValueError, match=f"{possible} windows of {turns} turns"):
            windows(trajectories, count, turns, seed=0)
    else:
        assert len({part.name for part in windows(trajectories, count, turns, seed=0)}) == count


def test_a_jobs_beginning_is_first_turns_of_different_trajectories(set_64k: list[Trajectory]) -> None:
    taken = beginnings(set_64k, 50, 4, 1)
    whole = {f"{trajectory.name}@0": trajectory for trajectory in set_64k}
    assert len({trajectory.name for trajectory in taken}) == 50
    assert all(trajectory.turns == whole[trajectory.name].turns[:4] and not trajectory.prefix for trajectory in taken)
    assert taken == beginnings(set_64k, 50, 4, 1) != beginnings(set_64k, 50, 4, 2)
    with pytest.raises(ValueError, match="trajectories have 4 turns, not 501"):
        beginnings(set_64k, 501, 4, 1)


def test_what_has_a_prefix_is_not_resized() -> None:
    part = window(BRANCHED, 1, 2)
    assert scaled(part, 1) is stretched(part, 1.0, 1.0) is part
    for resize in (lambda: scaled(part, 2), lambda: stretched(part, 2.0, 1.0)):
        with pytest.raises(ValueError, match="size it, then take its window"):
            resize()
    with pytest.raises(ValueError, match="extend the set, then take windows"):
        extend([part], 2, seed=0)


def test_extension_prepends_a_synthetic_turn() -> None:
    first, second = extend([BRANCHED], 2, seed=0)
    assert first == BRANCHED
    shifted = tuple(Turn(t.context + 65, t.append, t.generate, t.think_s) for t in BRANCHED.turns)
    assert second == Trajectory("b+1", (Turn(0, 64, 1), *shifted))
    assert (FIRST.generate, FIRST.total) == (1, 65)


def test_extension_keeps_the_set_and_samples_it() -> None:
    given_set = generate("32K", 20)
    more = extend(given_set, 200, seed=5)
    assert more[:20] == given_set
    assert len({t.name for t in more}) == 200
    assert len({t.name.split("+")[0] for t in more[20:]}) > 15
    assert more == extend(given_set, 200, seed=5) != extend(given_set, 200, seed=6)
    assert extend(given_set, 7, seed=5) == given_set[:7]


def test_gaps_off_and_traced() -> None:
    (silent,) = with_gaps([BRANCHED], Gaps(), seed=0)
    assert [turn.think_s for turn in silent.turns] == [0, 0, 0, 0]
    assert with_gaps([BRANCHED], Gaps(GapKind.TRACED), seed=0) == [BRANCHED]


def test_lognormal_gaps_have_the_median_and_the_spread_asked_for() -> None:
    trajectories = generate("32K", 200)
    apart = with_gaps(trajectories, Gaps(GapKind.LOGNORMAL, median_s=10.0, sigma=1.5), seed=1)
    logs = [math.log(turn.think_s / 10) for t in apart for turn in t.turns[1:]]
    assert abs(sum(logs) / len(logs)) < 4 * 1.5 / math.sqrt(len(logs))
    assert pstdev(logs) == pytest.approx(1.5, abs=4 * 1.5 / math.sqrt(2 * len(logs)))
    assert all(t.turns[0].think_s == 0 for t in apart)
    assert [(a.context, a.append, a.generate) for t in apart for a in t.turns] == [
        (b.context, b.append, b.generate) for t in trajectories for b in t.turns
    ]


def test_gaps_depend_on_seed_and_name_only() -> None:
    gaps = Gaps(GapKind.LOGNORMAL, 1.0, 1.0)
    other = Trajectory("other", BRANCHED.turns)
    alone = with_gaps([BRANCHED], gaps, seed=1)[0]
    assert with_gaps([other, BRANCHED], gaps, seed=1)[1] == alone
    assert with_gaps([other], gaps, seed=1)[0].turns != alone.turns
    assert with_gaps([BRANCHED], gaps, seed=2)[0].turns != alone.turns


@pytest.mark.parametrize(("median_s", "sigma"), [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_no_such_gaps(median_s: float, sigma: float) -> None:
    with pytest.raises(ValueError, match="no lognormal distribution"):
        Gaps(GapKind.LOGNORMAL, median_s, sigma)
