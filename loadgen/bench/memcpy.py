"""What the shm transport is held against: one memcpy a piece into the same mapped region, and nothing else."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from common.transport.memory import Memory
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    memory = Memory.create("memcpy", layout.region_bytes)
    memory.view[:] = bytes(memory.size)
    yield Side(address=memory.path, memory=memory.view)


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    source = Memory.create("memcpy", layout.region_bytes)
    source.view[:] = layout.content().data
    target = Memory.open(address, layout.region_bytes)
    starts = [np.frombuffer(memory.view, np.uint8).ctypes.data for memory in (source, target)]
    runs = (layout.runs() + np.array([*starts, 0])).tolist()

    def copy() -> None:
        for from_, to, length in runs:
            ctypes.memmove(to, from_, length)

    yield Side(move=lambda: asyncio.to_thread(copy))
