"""Open loop: agents arrive as a Poisson or Gamma process, whatever the server does (spec §10, online)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from common.errors import ConfigError
from common.workload.arrivals import gamma_arrivals
from common.workload.trajectories import Trajectory
from loadgen.replay.agent import Agent, sleep_until
from loadgen.workload.load import Arrival


def schedule(
    trajectories: Sequence[Trajectory], aps: float, duration: float, seed: int, cv: float = 1.0
) -> list[Arrival]:
    """The whole run, decided beforehand by the seed: arrival times, and for each a trajectory drawn with replacement.

    Each arrival has a text of its own, so nothing hits what another arrival stored. ConfigError if nobody arrives.
    """
    draws = random.Random(f"sessions/{seed}")
    drawn = [(at, draws.choice(trajectories)) for at in gamma_arrivals(aps, duration, cv, seed)]
    arrivals = [
        Arrival(at, f"{trajectory.name}#{seed}.{number}", trajectory)
        for number, (at, trajectory) in enumerate(drawn)
    ]
    if not arrivals:
        raise ConfigError(
            f"no agent arrives in {duration:g} s at {aps:g} agents a second with seed {seed}: raise --duration or --aps"
        )
    return arrivals


async def online(agent: Agent, arrivals: Sequence[Arrival]) -> None:
    """Start every arrival at its time and wait for all to end. Tells the log when the last one started."""
    log = agent.log
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            due = log.started + arrival.at
            await sleep_until(due)
            group.create_task(agent.play(arrival.trajectory, due, arrival.name))
        log.last_start = log.started + arrivals[-1].at
