"""Adaptive roles against every fixed ratio of prefill to decode nodes, simulated (spec §12): the cases and what they
come to. All of one round play the same load; the controller has the same constants in every case."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

from common.errors import ConfigError
from common.perf.bounds import Plan, Turn
from common.perf.models import ModelProfile
from common.workload.arrivals import gamma_arrivals, on_off_arrivals
from common.workload.extend import extend
from common.workload.hits import pooled
from common.workload.phases import phased
from common.workload.trajectories import Trajectory
from common.workload.windows import windows
from loadgen.simulator import Cluster, Scenario, simulate
from loadgen.simulator.roles import AdaptiveRoles, least_nodes
from loadgen.workload.load import Arrival, Load, Offline, Online
from loadgen.workload.source import Source

#: The paper's agents a node in its large offline runs: 2,048 on 2P4D.
AGENTS_A_NODE = 2048 / 6
#: Mean rate of the streams, of what the planner's formula allows with the best ratio.
LOAD_SHARE = 0.6
#: Of gaps between arrivals, standard deviation over mean.
BURSTY_CV = 4.0
#: How many times the mean rate a burst has, and how often one comes.
BURST, PERIOD_S = 3.0, 240.0
#: After the last arrival, in which all agents end.
REST_S = 3600.0
NEVER = 1 << 62
#: Of which agents play one each, in turn, where a window is cut in two.
WINDOWS = 100

CASES = {
    "rollout": "all agents start at once; the first half of their turns appends 90 % of what they append, the second"
    " half generates 90 % of what they generate",
    "gamma": f"agents arrive in bursts: Gamma gaps with a coefficient of variation of {BURSTY_CV:g}",
    "on_off": f"agents arrive at {BURST:g} times the mean rate for a while, every {PERIOD_S:g} s",
    "readers": "agents that mostly generate arrive evenly, others, that mostly append, on and off, as above",
}

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """nodes in all, of `gpus` GPUs in use and their share of the NICs. turns: of a window of the streams; rollout: of
    one there, None: whole trajectories. duration_s: of arrivals. switch_s: see AdaptiveRoles."""

    model: ModelProfile
    nodes: int
    gpus: int
    turns: int
    rollout: int | None
    duration_s: float
    rounds: int
    switch_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = least_nodes(self._cluster(1))
        if self.nodes < 2 * least + 1:
            raise ConfigError(
                f"--nodes {self.nodes}: {self.model.name} takes {least} of each role, and one more to change roles:"
                f" the nearest is {2 * least + 1}"
            )

    def _cluster(self, prefill: int) -> Cluster:
        """Experts of a role are spread over all of its nodes."""
        decode = self.nodes - prefill
        return Cluster(
            prefill, decode, self.model, engines=self.gpus, prefill_group=self.nodes, decode_group=self.nodes
        )

    @property
    def fixed(self) -> list[Cluster]:
        """Every ratio that the model allows."""
        least = least_nodes(self._cluster(1))
        return [self._cluster(prefill) for prefill in range(least, self.nodes - least + 1)]

    @property
    def start(self) -> Cluster:
        """Where adapting starts: as near to the paper's 1 : 2 as may be."""
        return min(self.fixed, key=lambda cluster: abs(cluster.prefill_nodes / self.nodes - 1 / 3))

    def load(self, case: str, index: int) -> tuple[Load, Turn]:
        """Of a round. With the mean turn, from which alpha and beta follow."""
        seed = self.seed + index
        played = _native(self.start.limit)
        if case == "rollout":
            agents = round(AGENTS_A_NODE * self.nodes * self.gpus / self.start.hardware.gpus)
            turns = self.rollout
            taken = _windows(played, agents, turns, seed) if turns else _whole(played, agents, seed)
            rollouts = [phased(trajectory) if len(trajectory.turns) > 1 else trajectory for trajectory in taken]
            return Offline(rollouts, agents, whole=True), _mean_turn(rollouts)
        turn = _mean_turn(played)
        plans = [Plan(self.model, c.hardware, c.prefill_nodes, c.decode_nodes, turn, self.gpus) for c in self.fixed]
        rate = LOAD_SHARE * max(plan.bound("dualpath").turns_per_s for plan in plans) / self.turns
        if case == "gamma":
            return self._stream(gamma_arrivals(rate, self.duration_s, BURSTY_CV, seed), played, seed), turn
        if case == "on_off":
            times = on_off_arrivals(rate, BURST, PERIOD_S, self.duration_s, seed)
            return self._stream(times, played, seed), turn
        half = self.turns // 2
        changed = [phased(t) for t in _windows(played, WINDOWS, 2 * half, seed)]
        readers, writers = (
            [replace(t, turns=t.turns[part], prefix=t.turns[part][0].context) for t in changed]
            for part in (slice(0, half), slice(half, None))
        )
        steady = self._stream(gamma_arrivals(rate, self.duration_s, 1.0, seed), writers, seed)
        bursts = self._stream(on_off_arrivals(rate, BURST, PERIOD_S, self.duration_s, seed + 1), readers, seed + 1)
        arrivals = sorted([*steady.arrivals, *bursts.arrivals])
        return Online(arrivals, self.duration_s + REST_S, NEVER), turn

    def _stream(self, times: Sequence[float], played: Sequence[Trajectory], seed: int) -> Online:
        """An agent at each time, with a window of its own if they are longer ones."""
        if not times:
            raise ConfigError(f"nobody arrives in {self.duration_s:g} s")
        if max(len(t.turns) for t in played) > self.turns:
            taken = _windows(played, len(times), self.turns, seed)
        else:
            taken = [played[index % len(played)] for index in range(len(times))]
        arrivals = [Arrival(at, f"{t.name}#{seed}.{n}", t) for n, (at, t) in enumerate(zip(times, taken, strict=True))]
        return Online(arrivals, self.duration_s + REST_S, NEVER)

    def play(
        self, cases: Sequence[str], begin: Callable[[str], Callable[[float], None]], add: Callable[[Run], None]
    ) -> None:
        """All runs, in order; begin is told of each and gives whom to tell of its progress."""
        for case in cases:
            for index in range(self.rounds):
                load, turn = self.load(case, index)
                for cluster, roles in self._contenders():
                    name = f"{cluster.name}, adaptive" if roles else cluster.name
                    scenario = Scenario(cluster, "dualpath", load, turn, self.seed + index, roles=roles)
                    told = simulate(scenario, begin(f"{case} {name}, round {index + 1} of {self.rounds}"))
                    add({**self._place(case, index, cluster, roles, load), **told})

    def _contenders(self) -> Iterator[tuple[Cluster, AdaptiveRoles | None]]:
        yield from ((cluster, None) for cluster in self.fixed)
        yield self.start, AdaptiveRoles(self.switch_s)

    def _place(self, case: str, index: int, cluster: Cluster, roles: AdaptiveRoles | None, load: Load) -> Run:
        there = {"agents": load.agents} if isinstance(load, Offline) else {"aps": len(load.arrivals) / self.duration_s}
        return {
            "case": case,
            "system": "dualpath",
            "repeat": index,
            "nodes": f"{cluster.name} adaptive" if roles else cluster.name,
            "adaptive": roles is not None,
            "model": self.model.name,
            "placement": "simulated",
            **there,
        }


@lru_cache(1)
def _native(limit: int) -> tuple[Trajectory, ...]:
    """The paper's 64K set, cut at so many tokens of context."""
    return Source().load(limit, 0).trajectories


def _windows(played: Sequence[Trajectory], count: int, turns: int, seed: int) -> list[Trajectory]:
    try:
        return windows(played, count, turns, seed)
    except ValueError as error:
        raise ConfigError(f"{error}: take fewer nodes or GPUs") from None


def _whole(played: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """Each once before one comes again."""
    return extend(random.Random(f"rollout/{seed}").sample(played, len(played)), count, seed)


def _mean_turn(played: Sequence[Trajectory]) -> Turn:
    mean = pooled(played)
    return Turn(round(mean.hit), round(mean.miss), round(mean.generate))


# -- what they come to --


def job_s(run: Mapping[str, Any]) -> float:
    """Of a job, to its last agent's end; of a stream, the mean of its agents."""
    return float(run["makespan_s"] if "agents" in run else run["jct_s"]["mean"])


def ttft_p99_s(run: Mapping[str, Any]) -> float:
    return float(run["ttft_ms"]["p99"]) / 1e3


def spreads(runs: Sequence[Run], start: str) -> dict[str, list[float]]:
    """One value a round. Against the fixed ratio that is best in this measure in this round; against the one that
    adapting starts from. The rollout's names have no suffix."""
    found: dict[str, list[float]] = {}
    for case in CASES:
        suffix = "" if case == "rollout" else f"_{case}"
        for index in sorted({run["repeat"] for run in runs if run["case"] == case}):
            here = [run for run in runs if (run["case"], run["repeat"]) == (case, index)]
            adaptive = [run for run in here if run["adaptive"]]
            fixed = [run for run in here if not run["adaptive"]]
            if not adaptive or not fixed:
                continue
            for name, measure in (("jct", job_s), ("ttft_p99", ttft_p99_s)):
                own, best = measure(adaptive[0]), min(map(measure, fixed))
                found.setdefault(f"{name}_adaptive_over_best_static{suffix}", []).append(own / best)
                for run in fixed:
                    if run["nodes"] == start:
                        found.setdefault(f"{name}_adaptive_over_start{suffix}", []).append(own / measure(run))
            found.setdefault(f"switches{suffix}", []).append(adaptive[0]["roles"]["count"])
    return found


def ratios(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(median(values)) for name, values in found.items()}
