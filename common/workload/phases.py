"""Trajectories whose phases differ: an agent that reads first and writes later (spec §12).

What a trajectory appends and generates in all stays, and so does the number of its turns; only where is changed. So a
phased set has the columns of the set that it is made of, but for the mean context, which grows sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from common.workload.trajectories import Trajectory, Turn

#: Of appended tokens in the first half of the turns, and of generated ones in the second.
SHARE = 0.9


def phased(trajectory: Trajectory, share: float = SHARE) -> Trajectory:
    """The first half of the turns appends `share` of all that is appended, the second half generates `share` of all
    that is generated; within a half, lengths keep their proportions. ValueError for fewer than two turns, or for one
    that forgets a part of its history."""
    turns = trajectory.turns
    half = len(turns) // 2
    if not half:
        raise ValueError(f"{trajectory.name} has {len(turns)} turns: two phases take two")
    appends = _moved([turn.append for turn in turns], half, share)
    generates = _moved([turn.generate for turn in turns], half, 1 - share)
    history, changed = trajectory.prefix, trajectory.prefix
    made: list[Turn] = []
    for turn, append, generate in zip(turns, appends, generates, strict=True):
        if turn.context != history:
            raise ValueError(f"{trajectory.name} forgets some of its history: its phases cannot be moved")
        made.append(Turn(changed, append, generate, turn.think_s))
        history, changed = turn.total, made[-1].total
    return Trajectory(f"{trajectory.name}/phased", tuple(made), trajectory.prefix)


def _moved(lengths: Sequence[int], half: int, share: float) -> list[int]:
    """The same sum, `share` of it (or what is left to it, if each has one token at least) in the first `half`."""
    first = min(max(round(sum(lengths) * share), half), sum(lengths) - (len(lengths) - half))
    return [*_scaled(lengths[:half], first), *_scaled(lengths[half:], sum(lengths) - first)]


def _scaled(lengths: Sequence[int], total: int) -> list[int]:
    """Whole numbers of at least 1 that sum to total; beyond 1, in proportion to the lengths."""
    spare = total - len(lengths)
    ends = [round(spare * end / sum(lengths)) for end in accumulate(lengths, initial=0)]
    return [1 + after - before for before, after in pairwise(ends)]
