"""Loads that change: trajectories of two phases, and arrivals on and off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.workload.arrivals import on_off_arrivals
from common.workload.hits import pooled
from common.workload.phases import phased
from common.workload.synthetic import generate
from common.workload.trajectories import Trajectory, Turn

lengths = st.integers(1, 400)


@st.composite
def trajectories(draw):
    history = prefix = draw(st.integers(0, 5000))
    turns = []
    for append, generated in draw(st.lists(st.tuples(lengths, lengths), min_size=2, max_size=40)):
        turns.append(Turn(history, append, generated, 0.5))
        history = turns[-1].total
    return Trajectory("t", tuple(turns), prefix)


@given(trajectories(), st.floats(0.5, 1.0))
def test_the_same_totals_in_the_same_number_of_turns(trajectory, share):
    changed = phased(trajectory, share)
    assert (len(changed.turns), changed.prefix) == (len(trajectory.turns), trajectory.prefix)
    assert changed.peak == trajectory.peak
    for field in ("append", "generate"):
        before, after = (sum(getattr(turn, field) for turn in one.turns) for one in (trajectory, changed))
        assert before == after


def test_worked_by_hand():
    """40 + 20 + 20 + 20 appended: 90 in the first half, in proportion 2 to 1; 100 generated: 10 in the first half."""
    turns = (Turn(7, 40, 25), Turn(72, 20, 25), Turn(117, 20, 25), Turn(162, 20, 25))
    changed = phased(Trajectory("t", turns, 7)).turns
    assert [turn.append for turn in changed] == [60, 30, 5, 5]
    assert [turn.generate for turn in changed] == [5, 5, 45, 45]
    assert [turn.context for turn in changed] == [7, 72, 107, 157]


def test_a_set_begins_prefill_heavy_and_ends_decode_heavy():
    played = [phased(trajectory) for trajectory in generate("64K")[:100]]
    halves = [
        pooled([Trajectory("h", t.turns[a:b], t.turns[a].context)])
        for t in played
        for a, b in ((0, len(t.turns) // 2), (len(t.turns) // 2, len(t.turns)))
    ]
    first, second = halves[::2], halves[1::2]
    assert sum(h.miss for h in first) > 3 * sum(h.miss for h in second)
    assert 8 * sum(h.generate for h in first) < sum(h.generate for h in second)


def test_what_cannot_be_phased():
    with pytest.raises(ValueError, match="two phases take two"):
        phased(Trajectory("t", (Turn(0, 9, 9),)))
    with pytest.raises(ValueError, match="forgets"):
        phased(Trajectory("t", (Turn(0, 9, 9), Turn(3, 9, 9))))


@given(st.floats(1.0, 8.0), st.integers(0, 20))
def test_bursts_keep_the_mean_rate(burst, seed):
    times = on_off_arrivals(2.0, burst, 60.0, 1200.0, seed)
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 1200.0
    assert len(times) == pytest.approx(2400, abs=5 * 2400**0.5)
    on = sum(time % 60.0 < 60.0 / (burst + 1) for time in times)
    assert on / len(times) == pytest.approx(burst / (burst + 1), abs=0.06)
    assert times == on_off_arrivals(2.0, burst, 60.0, 1200.0, seed)


@pytest.mark.parametrize("arguments", [(0, 2, 60), (1, 0.5, 60), (1, 2, 0)])
def test_what_is_no_burst(arguments):
    with pytest.raises(ValueError):
        on_off_arrivals(*arguments, 100.0, 0)
