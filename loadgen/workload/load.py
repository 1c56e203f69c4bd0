"""What is played in one run, by a live cluster or a simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.workload.trajectories import Trajectory


class Arrival(NamedTuple):
    """A trajectory that starts `at` seconds after the run does. name: its own, so that no two share text."""

    at: float
    name: str
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class Offline:
    """agents start at once; each plays one trajectory after another. The run ends once the last trajectory has started:
    so long all agents were active. whole: once all have ended."""

    trajectories: Sequence[Trajectory]
    agents: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Online:
    """Each trajectory starts at its time, in real seconds. The run ends after until_s: by then every turn that was due
    before the last arrival has had its first token, or has missed the objective. It is given up before once more than
    `misses` turns have missed that: by then it is hopeless."""

    arrivals: Sequence[Arrival]
    until_s: float
    misses: int

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(replace(arrival.trajectory, name=arrival.name) for arrival in self.arrivals)


Load = Offline | Online
