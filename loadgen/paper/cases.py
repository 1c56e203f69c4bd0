"""The simulations behind the figures: what one is of, how much of it is run, and each run once only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.perf.bounds import Plan
from common.perf.models import get_model_profile
from compose.fabric import parse_shape
from loadgen.paper.calibration import OFFLINE, ONLINE, Calibration, calibrated
from loadgen.simulator import Cluster, Scenario, offline, simulate
from loadgen.simulator.steady import Stream, beginning, busy, get_stream, steady
from loadgen.systems import BOUND_AS
from loadgen.workload.source import Source

SMALL_NODES = 3

OnProgress = Callable[[str, float], None]
"""Told what runs, and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. agents (offline) or aps (online). first_turns: that agents play so many first turns of their
    trajectories only, one after the other, as long as all are active: how a job begins. calibration: None is that of
    its kind of load."""

    system: str
    nodes: str = "2P4D"
    model: str = "ds-660b"
    set: str = "64K"
    agents: int = 0
    aps: float = 0.0
    append_scale: float = 1.0
    generation_scale: float = 1.0
    first_turns: int = 0
    calibration: Calibration | None = None

    @property
    def calibrated(self) -> Calibration:
        return self.calibration or (ONLINE if self.aps else OFFLINE)

    @property
    def cluster(self) -> Cluster:
        prefill, decode = parse_shape(self.nodes)
        calibration = self.calibrated
        return Cluster(prefill, decode, calibration.model(get_model_profile(self.model)), calibration.hardware)

    @property
    def small(self) -> bool:
        """Few nodes: whole jobs of them are short runs too, and more of a job is its tail, in which few agents are
        left and every system takes a single turn's time."""
        return sum(parse_shape(self.nodes)) <= SMALL_NODES

    @property
    def source(self) -> Source:
        return Source(set=self.set, append_scale=self.append_scale, generation_scale=self.generation_scale)

    @property
    def title(self) -> str:
        load = f"{self.aps:g} agents/s" if self.aps else f"{self.agents:,} agents"
        scales = [
            f"{what} x{scale:g}"
            for what, scale in (("append", self.append_scale), ("generation", self.generation_scale))
            if scale != 1
        ]
        first = [f"first {self.first_turns} turns"] if self.first_turns else []
        return ", ".join([f"{self.model} {self.nodes} {self.system}", self.set, load, *scales, *first])


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. turns: of the windows that a job is taken from, unless the case is small; 0 for whole
    trajectories everywhere. Online always plays windows of online_turns, for duration_s."""

    turns: int
    online_turns: int
    duration_s: float

    def whole(self, case: Case) -> bool:
        """Whether every agent plays a whole trajectory; JCT is the makespan then."""
        return not case.first_turns and (not self.turns or case.small)

    @property
    def statement(self) -> str:
        job = "offline: every agent plays its whole trajectory; JCT is the makespan"
        if self.turns:
            job += (
                f"; but with more than {SMALL_NODES} nodes (--quick) windows of up to {self.turns} turns, twice as many"
                " as agents; JCT is the turns of whole trajectories over the rate at which turns ended while all agents"
                " were active: the tail is not in it"
            )
        return (
            f"{job}. online: agents that arrive at a rate for {self.duration_s:g} s, each with a window of"
            f" up to {self.online_turns} turns from anywhere in its trajectory, so that the mix of contexts is that of"
            " a cluster which has served for long; a trajectory's JCT is its number of turns times a turn's mean time"
        )


FULL = Size(turns=0, online_turns=4, duration_s=600.0)
QUICK = Size(turns=3, online_turns=4, duration_s=90.0)


@dataclass
class Runner:
    """Runs cases, each once. results: what they gave, as loadgen.report.html reads runs."""

    size: Size = FULL
    seed: int = 0
    on_progress: OnProgress = lambda title, done: None
    results: dict[Case, dict[str, Any]] = field(default_factory=dict)

    def run(self, case: Case) -> dict[str, Any]:
        """The outcome of simulate(), with where it belongs in a sweep and with job_s (offline) or trajectory_s (online:
        of a mean trajectory), in seconds, as Size.statement says."""
        if case not in self.results:
            turns = self.size.online_turns if case.aps else self.size.turns or self.size.online_turns
            stream = get_stream(case.source, case.cluster.limit, turns, self.seed)
            scenario = self._scenario(case, stream)
            result = simulate(scenario, lambda done: self.on_progress(case.title, done))
            self.results[case] = {**self._place(case, scenario, stream), **result, **self._job(case, stream, result)}
        return self.results[case]

    def _scenario(self, case: Case, stream: Stream) -> Scenario:
        cluster, system, size = case.cluster, case.system, self.size
        if case.aps:
            scenario = steady(cluster, system, stream, case.aps, size.duration_s, self.seed)
        elif case.first_turns:
            scenario = beginning(cluster, system, stream, case.agents, case.first_turns, self.seed)
        elif not size.whole(case):
            scenario = busy(cluster, system, stream, case.agents, self.seed)
        else:
            scenario = offline(cluster, system, case.source, case.agents, seed=self.seed)
        return calibrated(scenario, case.calibrated)

    def _place(self, case: Case, scenario: Scenario, stream: Stream) -> dict[str, Any]:
        cluster = scenario.cluster
        plan = Plan(cluster.model, cluster.hardware, cluster.prefill_nodes, cluster.decode_nodes, scenario.mean_turn)
        return {
            "system": case.system,
            "model": case.model,
            "nodes": case.nodes,
            "mal": stream.max_length,
            "append_scale": case.append_scale,
            "generation_scale": case.generation_scale,
            "calibration": case.calibrated.name,
            "repeat": 0,
            "bound_as": BOUND_AS[case.system],
            "bounds": plan.describe(case.agents, round(stream.mean_turns) if case.agents else 0),
            **({"aps": case.aps} if case.aps else {"agents": case.agents}),
        }

    def _job(self, case: Case, stream: Stream, result: dict[str, Any]) -> dict[str, Any]:
        if case.aps:
            return {"trajectory_s": stream.trajectory_s(result), "token_s": stream.token_s(result)}
        if self.size.whole(case):
            return {"job_s": result["makespan_s"]}
        rate = result["turns_per_s"]
        return {"job_s": case.agents * stream.mean_turns / rate if rate else None, "makespan_s": None}


def mean_latency(run: dict[str, Any], name: str) -> float:
    """Seconds: mean ttft over the last window of an online run, ttst over all of it, tpot of all tokens."""
    if name == "tpot":
        return float(run["token_s"])
    told = run["verdict"]["window_ttft_s"]["mean"] if name == "ttft" else run["ttst_ms"]["mean"] / 1e3
    return float(told)
