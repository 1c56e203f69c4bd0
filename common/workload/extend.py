"""More trajectories than a set holds (spec §10)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from common.workload.trajectories import Trajectory, Turn

#: The synthetic first turn. The paper gives g_1 = 1 but not the length of a_1; one block is the shortest that changes
#: every block key after it, and the odd sum moves the block borders too.
FIRST = Turn(context=0, append=64, generate=1)


class Extended(Sequence[Trajectory]):
    """count trajectories: the given ones, then as many samples of them (with replacement) as are missing. A sample is
    made whenever it is asked for: thousands of them need not be kept. Those of one trajectory share their turns.

    A sample begins with a synthetic turn, which is part of every later context, and has a name, hence a text, of its
    own: nothing is shared with the original. It is FIRST.total tokens longer: cut it again where lengths are limited.
    ValueError for a trajectory with a prefix, which has no first turn to put one before.
    """

    def __init__(self, trajectories: Sequence[Trajectory], count: int, seed: int) -> None:
        if any(trajectory.prefix for trajectory in trajectories):
            raise ValueError("windows cannot be extended: extend the set, then take windows")
        rng = random.Random(f"extend/{seed}")
        self._given = list(trajectories[:count])
        self._sampled = [rng.choice(trajectories) for _ in range(len(trajectories), count)]
        self._shifted: dict[int, tuple[Turn, ...]] = {}  # by id of a trajectory, all of which are kept

    def __len__(self) -> int:
        return len(self._given) + len(self._sampled)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        given = len(self._given)
        return self._given[index] if index < given else self._sample(self._sampled[index - given], index)

    def _sample(self, trajectory: Trajectory, number: int) -> Trajectory:
        turns = self._shifted.get(id(trajectory))
        if turns is None:
            shifted = (replace(turn, context=turn.context + FIRST.total) for turn in trajectory.turns)
            turns = self._shifted[id(trajectory)] = (FIRST, *shifted)
        return Trajectory(f"{trajectory.name}+{number}", turns)

    @property
    def num_turns(self) -> int:
        """Of all of them, without making any."""
        lengths = [len(trajectory.turns) for trajectory in (*self._given, *self._sampled)]
        return sum(lengths) + len(self._sampled)

    @property
    def peak(self) -> int:
        """The longest context of any, in tokens."""
        given = max((trajectory.peak for trajectory in self._given), default=0)
        return max(given, *(trajectory.peak + FIRST.total for trajectory in set(self._sampled)), 0)


def extend(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """All of Extended's."""
    return list(Extended(trajectories, count, seed))
