"""More trajectories than a set holds (spec §10)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from common.workload.trajectories import Trajectory, Turn

#: The synthetic first turn. The paper gives g_1 = 1 but not the length of a_1; one block is the shortest that changes
#: every block key after it, and the odd sum moves the block borders too.
FIRST = Turn(context=0, append=64, generate=1)


def extend(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """count trajectories: the given ones, then as many samples of them (with replacement) as are missing.

    A sample begins with a synthetic turn, which is part of every later context, and has a name, hence a text, of its
    own: nothing is shared with the original. It is FIRST.total tokens longer: cut it again where lengths are limited.
    ValueError for a trajectory with a prefix, which has no first turn to put one before.
    """
    if any(trajectory.prefix for trajectory in trajectories):
        raise ValueError("windows cannot be extended: extend the set, then take windows")
    rng = random.Random(f"extend/{seed}")
    longer = [_sample(rng.choice(trajectories), number) for number in range(len(trajectories), count)]
    return [*trajectories[:count], *longer]


def _sample(trajectory: Trajectory, number: int) -> Trajectory:
    shifted = (replace(turn, context=turn.context + FIRST.total) for turn in trajectory.turns)
    return Trajectory(f"{trajectory.name}+{number}", (FIRST, *shifted))
