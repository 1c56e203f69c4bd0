"""This project's transports, as they are in every process of the system: on an event loop, with counters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import uvloop

from common.config import NetworkConfig
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, Transport
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.wire import decode, encode
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

new_event_loop = uvloop.new_event_loop
TRANSFER_S = 60.0


@asynccontextmanager
async def open_kind(kind: Literal["tcp", "shm"]) -> AsyncIterator[Transport]:
    """A transport of this kind, started."""
    transport = open_transport(NetworkConfig(transport=kind), "127.0.0.1", Metrics(), Faults([], ""), TRANSFER_S)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def receive(kind: Literal["tcp", "shm"], layout: Layout, given: str) -> AsyncIterator[Side]:
    async with open_kind(kind) as transport:
        memory = Memory.create("bench", layout.region_bytes)
        memory.view[:] = bytes(memory.size)
        yield Side(address=encode(transport.register(memory)).hex(), memory=memory.view)


@asynccontextmanager
async def send(kind: Literal["tcp", "shm"], layout: Layout, address: str) -> AsyncIterator[Side]:
    async with open_kind(kind) as transport:
        memory = Memory.create("bench", layout.region_bytes)
        memory.view[:] = layout.content().data
        target: RegionDescriptor = decode(bytes.fromhex(address))
        batch = Batch(transport.register(memory), target, layout.runs())

        async def move() -> None:
            await transport.write(batch, Intent.KV_LOAD)

        yield Side(move=move)


passive, active = partial(receive, "tcp"), partial(send, "tcp")
