"""Mooncake Transfer Engine over TCP (optional: mooncake-transfer-engine-non-cuda), the same pieces as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side


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
    columns = [column.tolist() for column in runs.T]

    async def move() -> None:
        if await asyncio.to_thread(engine.batch_transfer_sync_write, f"127.0.0.1:{port}", *columns):
            raise RuntimeError("mooncake: the batch failed")

    yield Side(move=move)
