"""Mooncake Transfer Engine over TCP (optional: mooncake-transfer-engine-non-cuda), the same pieces in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from common.transport.base import cut_runs
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

#: Of one batch: some thousand more, and it fails.
MAX_PIECES = 1024


def _engine(memory: Any) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    for step in (
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(memory.ctypes.data, memory.nbytes),
    ):
        if step:
            raise RuntimeError(f"mooncake: error {step}")
    return engine


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    memory = np.zeros(layout.region_bytes, np.uint8)
    engine = _engine(memory)
    yield Side(address=f"{engine.get_rpc_port()} {memory.ctypes.data}", memory=memory.data)


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    memory = layout.content()
    engine = _engine(memory)
    port, start = map(int, address.split())
    runs = layout.runs() + np.array([memory.ctypes.data, start, 0])
    batches = [[column.tolist() for column in batch.T] for batch in cut_runs(runs, layout.region_bytes, MAX_PIECES)]

    def write() -> None:
        for columns in batches:
            if engine.batch_transfer_sync_write(f"127.0.0.1:{port}", *columns):
                raise RuntimeError("mooncake: a batch failed")

    async def move() -> None:
        await asyncio.to_thread(write)

    yield Side(move=move)
