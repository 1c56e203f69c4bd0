"""Load of a cluster that has served for long: short windows of trajectories from all their phases.

Agents that play whole trajectories of hundreds of turns would take an hour to get there. Every turn of the set is as
likely as any other: a window is at most `turns` turns around a random place, shorter at both ends of its trajectory.
So the mean turn and the number of agents at a time are those of whole trajectories at the same agents a second.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from common.errors import ConfigError
from common.perf.bounds import Turn
from common.workload.arrivals import poisson_arrivals
from common.workload.extend import extend
from common.workload.hits import pooled
from common.workload.trajectories import Trajectory
from common.workload.windows import window
from loadgen.measures.turns import Slo
from loadgen.simulator import Cluster, Scenario
from loadgen.workload.load import Arrival, Offline, Online
from loadgen.workload.source import Played, Source

#: After the last arrival, for windows to end: were they cut, those that ended would be the short ones.
DRAIN_S = 60.0


@dataclass(frozen=True)
class Stream:
    """A workload to take windows of. turns: of a window, at most. mean_turns: of a whole trajectory; final_tokens: of
    its context in the end, mean; max_length: of any."""

    played: Played
    turns: int
    mean_turn: Turn
    mean_turns: float
    final_tokens: float
    max_length: int
    seed: int

    @property
    def origin(self) -> str:
        """For people."""
        return f"windows of up to {self.turns} turns at native context out of {self.played.origin}"

    @cached_property
    def mean_window(self) -> float:
        """Turns of a window, in the mean over all."""
        return self.turns * self.mean_turns / (self.mean_turns + self.turns - 1)

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """All windows, by their appended tokens: (these, trajectory, start, which may lie before its first turn)."""
        found = []
        for index, trajectory in enumerate(self.played.trajectories):
            appended = [0, *accumulate(turn.append for turn in trajectory.turns)]
            last = len(appended) - 1
            for start in range(1 - self.turns, last):
                tokens = appended[min(start + self.turns, last)] - appended[max(start, 0)]
                found.append((tokens, index, start))
        return sorted(found)

    def windows(self, count: int) -> list[Trajectory]:
        """count of them, as evenly spread over all as can be, in random order; the same for the same count."""
        rng = random.Random(f"stream/{self.seed}/{count}")
        places, shift = self._places, rng.random()
        taken = [places[int((number + shift) / count * len(places))] for number in range(count)]
        rng.shuffle(taken)
        windows = []
        for number, (_, index, start) in enumerate(taken):
            trajectory = self.played.trajectories[index]
            first, stop = max(start, 0), min(start + self.turns, len(trajectory.turns))
            part = window(trajectory, first, stop - first)
            windows.append(replace(part, name=f"{part.name}#{number}"))
        return windows

    def token_s(self, result: dict[str, Any]) -> float | None:
        """Mean time of a token after the second one, every token weighing the same, out of a run's windows. A mean over
        turns, as results have it, would be that of short turns: the hand-over weighs more than their few tokens. None
        if nothing ended."""
        window_s, ttft_ms, ttst_ms = (result[name]["mean"] for name in ("jct_s", "ttft_ms", "ttst_ms"))
        if window_s is None or ttst_ms is None:
            return None
        tokens = result["generated_tokens"] / result["turns"]
        turns = result["turns"] / result["trajectories"]["completed"]
        return float((window_s / turns - (ttft_ms + ttst_ms) / 1e3) / (tokens - 2))

    def trajectory_s(self, result: dict[str, Any]) -> float | None:
        """Mean time of a whole trajectory: its turns, each with the mean TTFT and TTST and the set's mean number of
        further tokens. None if nothing ended."""
        token_s = self.token_s(result)
        if token_s is None:
            return None
        first_two_s = (result["ttft_ms"]["mean"] + result["ttst_ms"]["mean"]) / 1e3
        return self.mean_turns * float(first_two_s + (self.mean_turn.generated - 2) * token_s)


@lru_cache(maxsize=32)
def get_stream(source: Source, limit: int, turns: int, seed: int = 0) -> Stream:
    """limit: of a context in the cluster, tokens. ConfigError for a workload that is none or does not fit."""
    played = source.load(limit, seed)
    mean = pooled(played.trajectories)
    count = len(played.trajectories)
    return Stream(
        played,
        turns,
        Turn(round(mean.hit), round(mean.miss), round(mean.generate)),
        mean.turns / count,
        sum(trajectory.turns[-1].total for trajectory in played.trajectories) / count,
        source.max_length(limit),
        seed,
    )


def steady(
    cluster: Cluster, system: str, stream: Stream, aps: float, duration_s: float, seed: int = 0, slo: Slo | None = None
) -> Scenario:
    """aps: agents a second with whole trajectories. ConfigError if nobody arrives in that time."""
    slo = slo or Slo()
    times = poisson_arrivals(aps * stream.mean_turns / stream.mean_window, duration_s, seed)
    if not times:
        raise ConfigError(f"no agent arrives in {duration_s:g} s at {aps:g} agents a second: raise --aps")
    played = stream.windows(len(times))
    arrivals = [Arrival(at, part.name, part) for at, part in zip(times, played, strict=True)]
    load = Online(arrivals, times[-1] + DRAIN_S, 1 << 62)
    return Scenario(cluster, system, load, stream.mean_turn, seed, slo, origin=stream.origin)


def busy(cluster: Cluster, system: str, stream: Stream, agents: int, seed: int = 0) -> Scenario:
    """agents at a time, until as many windows as that have been played and the last of as many more has started: the
    rate of its turns is that of a job while all of its agents are active."""
    load = Offline(stream.windows(2 * agents), agents)
    return Scenario(cluster, system, load, stream.mean_turn, seed, origin=stream.origin)


def beginning(cluster: Cluster, system: str, stream: Stream, agents: int, turns: int, seed: int = 0) -> Scenario:
    """agents at a time, as in busy(), each with so many first turns of a trajectory: how a job begins."""
    first = [replace(one, turns=one.turns[:turns]) for one in stream.played.trajectories]
    load = Offline(extend(first, 2 * agents, seed), agents)
    origin = f"the first {turns} turns of {stream.played.origin}"
    return Scenario(cluster, system, load, stream.mean_turn, seed, origin=origin)
