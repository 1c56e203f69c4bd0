"""One run of one system: a fresh cluster, all of a load, what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.clock import monotonic
from common.errors import ConfigError
from common.workload.hits import hits
from common.workload.text import IdText
from common.workload.trajectories import Trajectory
from loadgen.client.endpoint import Client, Completion, ensure_descriptors
from loadgen.client.prompt import History
from loadgen.experiments.lab import Lab
from loadgen.experiments.placement import CONTROL
from loadgen.measures.capacity import verdict
from loadgen.measures.host import HostMeter, cpu_seconds
from loadgen.measures.observe import Observer
from loadgen.measures.outcome import Witness, outcome, unstretched
from loadgen.measures.turns import RunLog, Slo, TurnRecord
from loadgen.progress import OnTurn
from loadgen.replay.agent import Agent
from loadgen.replay.closed_loop import replay
from loadgen.replay.open_loop import online
from loadgen.workload.load import Arrival, Load, Offline, Online

POLL_S = 0.1
#: Real seconds without a turn that ends, at the start and later, after which something must be broken.
FIRST_S, STALL_S = 60.0, 300.0


class GivenUp(Exception):
    """The load has proved to be too much."""


async def trial(
    lab: Lab,
    system: str,
    load: Load,
    seeded: Path,
    slo: Slo,
    know_hits: bool,
    on_turn: OnTurn,
) -> dict[str, Any]:
    """The outcome of this load on a fresh cluster of this system, whose store starts as seeded. ConfigError if the
    cluster does not come up or loses a process."""
    factor = lab.scaling.time_factor
    turns = [turn for trajectory in load.trajectories for turn in trajectory.turns]
    config = lab.config(system, CONTROL, seeded)
    async with lab.cluster(system, seeded) as cluster, Client(cluster.url, config.timeouts.request_s) as client:
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

        longest_gap_s = max(turn.think_s for turn in turns)
        text = IdText(lab.model().vocab_size)
        agent = Agent(client, served.name, text, log, longest_gap_s > 0, observe, know_hits)
        async with Observer(cluster.control, config.security, factor) as observer, HostMeter() as meter:
            pids = {status.member.name: status.member.pid for status in observer.samples[0].members}
            before = cpu_seconds(pids)
            log.started = monotonic()
            await cluster.during(_watched(_play(agent, load, factor), lab, log, STALL_S + longest_gap_s))
            log.ended = monotonic()
            if log.last_start is None:
                log.last_start = log.ended
            after = cpu_seconds(pids)
            logged = lab.logged()  # before it is shut down
            await asyncio.sleep(2 * config.timeouts.heartbeat_s)  # counters travel with heartbeats
    witness = Witness(
        observer.samples,
        observer.missed,
        meter.lags,
        meter.cpu,
        {name: round(after[name] - before[name], 2) for name in after},
        {trajectory.name: hits(trajectory) for trajectory in load.trajectories},
        logged,
    )
    result = outcome(log, slo, witness, factor, lab.scaling.gpus / lab.scaling.hardware.gpus)
    if isinstance(load, Online):
        result["given_up"] = log.interrupted
        result["verdict"] = verdict(unstretched(log, factor), slo, log.interrupted)
    return result


async def _play(agent: Agent, load: Load, factor: float) -> None:
    """All of the load in wall time; log.interrupted says that it was given up."""
    try:
        if isinstance(load, Offline):
            ensure_descriptors(load.agents)
            job = replay(agent, stretched(load.trajectories, factor), load.agents)
            await (job if load.whole else _until_all_started(job, agent.log))
        else:
            ensure_descriptors(len(load.arrivals))
            arrivals = [
                Arrival(arrival.at * factor, arrival.name, trajectory)
                for arrival, trajectory in zip(load.arrivals, stretched(load.trajectories, factor), strict=True)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(load.until_s * factor):
                    await online(agent, arrivals)
    except* GivenUp:
        agent.log.interrupted = True


async def _watched(playing: Coroutine[Any, Any, None], lab: Lab, log: RunLog, stall_s: float) -> None:
    """Play, but not on and on (stall_s, once turns have ended) without a turn that ends. ConfigError then."""
    task = asyncio.create_task(playing)
    try:
        ended = 0
        while not task.done():
            patience_s = (stall_s if ended else FIRST_S) * lab.scaling.time_factor
            await asyncio.wait({task}, timeout=patience_s)
            if not task.done() and len(log.turns) == ended:
                said = lab.logged() or "nothing"
                raise ConfigError(f"no turn has ended for {patience_s:g} s; {lab.run.keep()} has the logs, with {said}")
            ended = len(log.turns)
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_all_started(job: Coroutine[Any, Any, None], log: RunLog) -> None:
    playing = asyncio.create_task(job)
    try:
        while log.last_start is None and not playing.done():
            await asyncio.wait({playing}, timeout=POLL_S)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


def stretched(trajectories: Sequence[Trajectory], factor: float) -> list[Trajectory]:
    """The same with think times of the live cluster."""
    return [
        replace(t, turns=tuple(replace(turn, think_s=turn.think_s * factor) for turn in t.turns)) for t in trajectories
    ]

