"""NIXL over UCX over TCP (optional: nixl), the same pieces as one prepared transfer."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

#: Without this UCX would find that both processes share a host, and use their memory.
TCP_ONLY = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def _agent(name: str, memory: Any) -> Any:
    os.environ.update(TCP_ONLY)
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    memory = np.zeros(layout.region_bytes, np.uint8)
    agent = _agent("receiver", memory)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    yield Side(address=json.dumps([metadata, memory.ctypes.data]), memory=memory.data)


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    memory = layout.content()
    agent = _agent("sender", memory)
    metadata, start = json.loads(address)
    remote = agent.add_remote_agent(base64.b64decode(metadata))
    runs = layout.runs().tolist()

    def places(base: int, column: int) -> Any:
        return agent.get_xfer_descs([(base + run[column], run[2], 0) for run in runs], "DRAM")

    transfer = agent.initialize_xfer("WRITE", places(memory.ctypes.data, 0), places(start, 1), remote)

    async def move() -> None:
        state = agent.transfer(transfer)
        while state == "PROC":
            time.sleep(0.0001)  # noqa: ASYNC251 - nothing else is to run here
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"nixl: {state}")

    yield Side(move=move)
