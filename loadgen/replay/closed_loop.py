"""Closed loop: N agents start at once; each takes the next session when it is done with one (spec §10, offline)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from common.clock import monotonic
from common.workload.trajectories import Trajectory
from loadgen.replay.agent import Agent


async def replay(agent: Agent, trajectories: Sequence[Trajectory], agents: int) -> None:
    """Play every trajectory once, in order, at most `agents` at a time. Tells the log when the last one started."""
    waiting = deque(trajectories)
    log = agent.log

    async def work() -> None:
        due = log.started
        while waiting:
            trajectory = waiting.popleft()
            if not waiting:
                log.last_start = due
            await agent.play(trajectory, due)
            due = monotonic()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(agents, len(trajectories))):
            group.create_task(work())
