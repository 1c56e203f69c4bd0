"""The processes of a measurement (common.isolation.side), started and ended: where each stands is the caller's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.children import Child, python_module
from common.config import NetworkConfig
from common.errors import ConfigError
from common.isolation.latency import Latency, latency_of
from common.isolation.side import TRANSFER_S, Role, Task
from common.transport.base import Intent

#: For a process to start, and for a measurement beyond its own time.
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of a measurement runs. prefix: in front of its command; host: the interface that it uses."""

    host: str
    network: NetworkConfig
    prefix: tuple[str, ...] = ()

    def task(self, role: Role, **fields: Any) -> Task:
        return Task(role, self.host, self.network.model_dump(mode="json"), **fields)


class Side:
    """A process that is running. Whoever starts it must end() it."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @classmethod
    def start(cls, task: Task, prefix: Sequence[str] = ()) -> Side:
        command = [*prefix, *python_module("common.isolation.side")]
        return cls(Child(task.role.value, command, first_line=task.line(), log=subprocess.DEVNULL))

    @property
    def alive(self) -> bool:
        return self._child.alive

    async def hear(self, timeout: float) -> Any:
        """The next thing that it says. ConfigError if that is an error, if it ends, or if it is late."""
        try:
            async with asyncio.timeout(timeout):
                line = await self._child.readline()
        except TimeoutError:
            raise ConfigError(f"measuring isolation: {self._child.name} did not answer within {timeout:g} s") from None
        said = {"error": f"ended with status {await self._child.ended()}"} if line is None else json.loads(line)
        if isinstance(said, dict):
            raise ConfigError(f"measuring isolation: {self._child.name}: {said['error']}")
        return said

    def end(self) -> None:
        self._child.kill()


@asynccontextmanager
async def target_at(place: Place, gives_way: bool = False) -> AsyncIterator[str]:
    """A process that can be written to; its RegionDescriptor in hex. gives_way: it is for bulk. ConfigError."""
    side = Side.start(place.task(Role.TARGET, gives_way=gives_way), place.prefix)
    try:
        yield await side.hear(START_S)
    finally:
        side.end()


@asynccontextmanager
async def bulk_from(places: Sequence[Place], target: str, intent: Intent, flows: int) -> AsyncIterator[None]:
    """Bulk from all of these places to the target, so many connections each, in the class of an intent, for as long as
    the context lasts. ConfigError also if it has ended before."""
    async with AsyncExitStack() as ends:
        sides = []
        for place in places:
            task = place.task(Role.BULK, target=target, intent=intent, flows=flows, gives_way=True)
            sides.append(Side.start(task, place.prefix))
            ends.callback(sides[-1].end)
        for side in sides:
            await side.hear(START_S)
        yield
        for side in sides:
            if not side.alive:
                await side.hear(START_S)  # why


async def ping_from(place: Place, target: str, seconds: float) -> Latency:
    """Round trips of small messages of the high class, measured for so long. ConfigError."""
    side = Side.start(replace(place.task(Role.PING), target=target, seconds=seconds), place.prefix)
    try:
        return latency_of([value / 1e6 for value in await side.hear(START_S + seconds + TRANSFER_S)])
    finally:
        side.end()


@asynccontextmanager
async def awake() -> AsyncIterator[None]:
    """Keeps every CPU of this host from falling asleep; whoever wants one gets it at once."""
    sides = [Side.start(Task(Role.AWAKE)) for _ in range(os.cpu_count() or 1)]
    try:
        for side in sides:
            await side.hear(START_S)
        yield
    finally:
        for side in sides:
            side.end()
