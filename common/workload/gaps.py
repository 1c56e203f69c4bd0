"""Tool time: how long an agent is busy between the end of one turn and the start of the next (spec §10, §12)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from common.workload.trajectories import Trajectory


class GapKind(StrEnum):
    """Where gaps come from."""

    OFF = "off"              # none: the paper's replay
    TRACED = "traced"        # the trajectory's own think times
    LOGNORMAL = "lognormal"  # drawn for each turn


@dataclass(frozen=True, slots=True)
class Gaps:
    """median_s and sigma (of the logarithm) are for LOGNORMAL only. ValueError if they are not a distribution."""

    kind: GapKind = GapKind.OFF
    median_s: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if self.kind is GapKind.LOGNORMAL and not (0 < self.median_s < math.inf and 0 <= self.sigma < math.inf):
            raise ValueError(f"a median of {self.median_s} s and a sigma of {self.sigma} are no lognormal distribution")


def with_gaps(trajectories: Sequence[Trajectory], gaps: Gaps, seed: int) -> list[Trajectory]:
    """The trajectories with their think_s set. Drawn gaps depend on the seed and the trajectory's name only, so a
    trajectory has the same ones whatever it is played beside. The first turn waits for nobody: its gap is 0."""
    if gaps.kind is GapKind.TRACED:
        return list(trajectories)
    return [_with_gaps(trajectory, gaps, seed) for trajectory in trajectories]


def _with_gaps(trajectory: Trajectory, gaps: Gaps, seed: int) -> Trajectory:
    rng = random.Random(f"gaps/{seed}/{trajectory.name}")

    def gap(index: int) -> float:
        if gaps.kind is GapKind.OFF or index == 0:
            return 0.0
        return rng.lognormvariate(math.log(gaps.median_s), gaps.sigma)

    return replace(trajectory, turns=tuple(replace(t, think_s=gap(i)) for i, t in enumerate(trajectory.turns)))
