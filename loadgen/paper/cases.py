"""The simulations behind the figures: what one is of, how much of it is run, and each run once only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.perf.bounds import Plan
from common.perf.models import get_model_profile
from compose.fabric import parse_shape
from loadgen.paper.calibration import CALIBRATIONS, Calibration
from loadgen.simulator import Cluster, Scenario, offline, simulate
from loadgen.steady import Stream, get_stream, steady
from loadgen.systems import BOUND_AS
from loadgen.workload import Source

OnProgress = Callable[[str, float], None]
"""Told what runs, and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. agents (offline) or aps (online). calibration: a key of CALIBRATIONS."""

    system: str
    nodes: str = "2P4D"
    model: str = "ds-660b"
    set: str = "64K"
    agents: int = 0
    aps: float = 0.0
    append_scale: float = 1.0
    generation_scale: float = 1.0
    calibration: str = ""

    @property
    def calibrated(self) -> Calibration:
        return CALIBRATIONS[self.calibration or ("online" if self.aps else "offline")]

    @property
    def cluster(self) -> Cluster:
        prefill, decode = parse_shape(self.nodes)
        return Cluster(prefill, decode, get_model_profile(self.model), self.calibrated.hardware)

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
        return ", ".join([f"{self.model} {self.nodes} {self.system}", self.set, load, *scales])


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. turns: of the windows that a job is taken from, 0 for whole trajectories; online always plays
    windows of online_turns, for duration_s."""

    turns: int
    online_turns: int
    duration_s: float

    @property
    def statement(self) -> str:
        job = (
            "offline: every agent plays its whole trajectory; JCT is the makespan"
            if not self.turns
            else f"offline (--quick): twice as many windows of {self.turns} turns as agents; JCT is the turns of whole"
            " trajectories over the rate at which turns ended while all agents were active: the tail is not in it"
        )
        return (
            f"{job}. online: agents that arrive at a rate for {self.duration_s:g} s, each with a window of"
            f" {self.online_turns} turns from anywhere in its trajectory, so that the mix of contexts is that of a"
            " cluster which has served for long; a trajectory's JCT is its number of turns times a turn's mean time"
        )


FULL = Size(turns=0, online_turns=8, duration_s=300.0)
QUICK = Size(turns=4, online_turns=4, duration_s=90.0)


@dataclass
class Runner:
    """Runs cases, each once. results: what they gave, as loadgen.report_html reads runs."""

    size: Size = FULL
    seed: int = 0
    on_progress: OnProgress = lambda title, done: None
    results: dict[Case, dict[str, Any]] = field(default_factory=dict)

    def run(self, case: Case) -> dict[str, Any]:
        """The outcome of simulate(), with where it belongs in a sweep and with job_s (offline) or trajectory_s (online:
        of a mean trajectory), in seconds, as Size.statement says."""
        if case not in self.results:
            scenario, stream = self._scenario(case)
            result = simulate(scenario, lambda done: self.on_progress(case.title, done))
            self.results[case] = {**self._place(case, scenario, stream), **result, **self._job(case, stream, result)}
        return self.results[case]

    def _scenario(self, case: Case) -> tuple[Scenario, Stream]:
        cluster = case.cluster
        stream = get_stream(case.source, cluster.limit, self.size.online_turns, self.seed)
        if case.aps:
            return steady(cluster, case.system, stream, case.aps, self.size.duration_s, self.seed), stream
        if self.size.turns:
            windows = 2 * case.agents
            return (
                offline(
                    cluster, case.system, case.source, case.agents, windows, self.size.turns, False, seed=self.seed
                ),
                stream,
            )
        return offline(cluster, case.system, case.source, case.agents, seed=self.seed), stream

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
            return {"trajectory_s": stream.trajectory_s(result)}
        if not self.size.turns:
            return {"job_s": result["makespan_s"]}
        rate = result["turns_per_s"]
        return {"job_s": case.agents * stream.mean_turns / rate if rate else None, "makespan_s": None}
