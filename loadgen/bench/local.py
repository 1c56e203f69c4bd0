"""A copy between two regions of one process through its transport: a host-device copy where device memory is a segment.
The passive side has nothing to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.transport.base import Batch, Intent
from common.transport.memory import Memory
from loadgen.bench.ours import new_event_loop, open_kind
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

__all__ = ["active", "new_event_loop", "passive"]


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    yield Side()


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    async with open_kind("shm") as transport:
        source, target = (Memory.create("local", layout.region_bytes) for _ in range(2))
        source.view[:], target.view[:] = layout.content().data, bytes(target.size)
        batch = Batch(transport.register(source), transport.register(target), layout.runs())

        async def move() -> None:
            await transport.write(batch, Intent.KV_LOAD)

        yield Side(move=move, memory=target.view)
