"""One run of one system: a fresh cluster, all of a load, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.clock import monotonic
from common.workload.hits import hits
from common.workload.text import IdText
from common.workload.trajectories import Trajectory
from loadgen.agent import Agent
from loadgen.client import Client, Completion, ensure_descriptors
from loadgen.host import HostMeter, cpu_seconds
from loadgen.lab import Lab
from loadgen.measure import RunLog, Slo, TurnRecord
from loadgen.observe import Observer
from loadgen.online import Arrival, online
from loadgen.outcome import Witness, outcome
from loadgen.placement import CONTROL
from loadgen.prompt import History
from loadgen.replay import replay


@dataclass(frozen=True, slots=True)
class Offline:
    """agents start at once; each plays one trajectory after another until all are played."""

    trajectories: tuple[Trajectory, ...]
    agents: int


@dataclass(frozen=True, slots=True)
class Online:
    """Each trajectory starts at its time, in real seconds. The run is given up once more than `misses` turns have
    missed the TTFT objective: it cannot meet it at the 99th percentile any more."""

    arrivals: tuple[Arrival, ...]
    misses: int

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(replace(arrival.trajectory, name=arrival.name) for arrival in self.arrivals)


Load = Offline | Online


class GivenUp(Exception):
    """The load has proved to be too much."""


async def trial(
    lab: Lab,
    system: str,
    load: Load,
    seeded: Path,
    slo: Slo,
    know_hits: bool,
    on_turn: Callable[[TurnRecord], None],
) -> dict[str, Any]:
    """The outcome of this load on a fresh cluster of this system, whose store starts as seeded. ConfigError if the
    cluster does not come up or loses a process."""
    factor = lab.scaling.time_factor
    turns = [turn for trajectory in load.trajectories for turn in trajectory.turns]
    async with lab.cluster(system, seeded) as cluster, Client(cluster.url, _patience_s(lab)) as client:
        served = await client.model()
        log = RunLog(len(turns), started=0.0)
        missed = 0

        def observe(record: TurnRecord, history: History, answer: Completion) -> None:
            nonlocal missed
            on_turn(record)
            if isinstance(load, Online) and (record.ttft is None or record.ttft > slo.ttft_s * factor):
                missed += 1
                if missed > load.misses:
                    raise GivenUp

        think = any(turn.think_s for turn in turns)
        text = IdText(lab.model().vocab_size)
        agent = Agent(client, served.name, text, log, think, observe, know_hits)
        security = lab.config(system, CONTROL, seeded).security
        async with Observer(cluster.control, security, factor) as observer, HostMeter() as meter:
            pids = {status.member.name: status.member.pid for status in observer.samples[0].members}
            before = cpu_seconds(pids)
            log.started = monotonic()
            await cluster.during(_play(agent, load, factor))
            log.ended = monotonic()
            if log.last_start is None:
                log.last_start = log.ended
            after = cpu_seconds(pids)
    witness = Witness(
        observer.samples,
        observer.missed,
        meter.lags,
        meter.cpu,
        {name: round(after[name] - before[name], 2) for name in after},
        sum(sum(hits(trajectory)) for trajectory in load.trajectories),
    )
    return {**outcome(log, slo, witness, factor), "given_up": log.interrupted}


async def _play(agent: Agent, load: Load, factor: float) -> None:
    """All of the load in wall time; log.interrupted says that it was given up."""
    try:
        if isinstance(load, Offline):
            ensure_descriptors(load.agents)
            await replay(agent, stretched(load.trajectories, factor), load.agents)
        else:
            ensure_descriptors(len(load.arrivals))
            arrivals = [
                Arrival(arrival.at * factor, arrival.name, trajectory)
                for arrival, trajectory in zip(load.arrivals, stretched(load.trajectories, factor), strict=True)
            ]
            await online(agent, arrivals)
    except* GivenUp:
        agent.log.interrupted = True


def stretched(trajectories: Sequence[Trajectory], factor: float) -> list[Trajectory]:
    """The same with think times of the live cluster."""
    return [
        replace(t, turns=tuple(replace(turn, think_s=turn.think_s * factor) for turn in t.turns)) for t in trajectories
    ]


def _patience_s(lab: Lab) -> float:
    return lab.config("basic", CONTROL, Path("/")).timeouts.request_s
