"""Online load of a cluster that has served for long: windows of trajectories from all their phases, at a rate.

Agents that play whole trajectories of hundreds of turns would take an hour to get there. The mean turn and the number
of agents at a time are those of whole trajectories at the same agents a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from common.errors import ConfigError
from common.perf.bounds import Turn
from common.workload.arrivals import poisson_arrivals
from common.workload.hits import pooled
from common.workload.trajectories import Trajectory
from common.workload.windows import windows
from loadgen.load import Arrival, Online
from loadgen.measure import Slo
from loadgen.simulator import Cluster, Scenario
from loadgen.workload import Played, Source

#: After the last arrival, for windows to end: were they cut, those that ended would be the short ones.
DRAIN_S = 60.0


@dataclass(frozen=True)
class Stream:
    """A workload to take windows of. turns: of a window. mean_turns: of a whole trajectory; final_tokens: of its
    context in the end, mean; max_length: of any."""

    played: Played
    turns: int
    mean_turn: Turn
    mean_turns: float
    final_tokens: float
    max_length: int
    seed: int

    def windows(self, count: int) -> Sequence[Trajectory]:
        """The same ones for the same count. ConfigError if there are not so many."""
        try:
            return windows(self.played.trajectories, count, self.turns, self.seed)
        except ValueError as error:
            raise ConfigError(f"{error}: take a shorter time, or fewer agents a second") from None

    def token_s(self, result: dict[str, Any]) -> float | None:
        """Mean time of a token after the second one, every token weighing the same, out of a run's windows. A mean over
        turns, as results have it, would be that of short turns: the hand-over weighs more than their few tokens. None
        if nothing ended."""
        window_s, ttft_ms, ttst_ms = (result[name]["mean"] for name in ("jct_s", "ttft_ms", "ttst_ms"))
        if window_s is None or ttst_ms is None:
            return None
        tokens = result["generated_tokens"] / result["turns"]
        return float((window_s / self.turns - (ttft_ms + ttst_ms) / 1e3) / (tokens - 2))

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
    times = poisson_arrivals(aps * stream.mean_turns / stream.turns, duration_s, seed)
    if not times:
        raise ConfigError(f"no agent arrives in {duration_s:g} s at {aps:g} agents a second: raise --aps")
    arrivals = [
        Arrival(at, f"{window.name}#{number}", window)
        for number, (at, window) in enumerate(zip(times, stream.windows(len(times)), strict=True))
    ]
    load = Online(arrivals, times[-1] + DRAIN_S, 1 << 62)
    origin = f"windows of {stream.turns} turns at native context out of {stream.played.origin}"
    return Scenario(cluster, system, load, stream.mean_turn, seed, slo, origin=origin)
