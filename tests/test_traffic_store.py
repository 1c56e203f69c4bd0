"""A traffic manager's side of storage, when its gateway is lost."""

from __future__ import annotations

import asyncio
import socket
from hashlib import blake2b
from typing import Any

import pytest

from common.blocks.geometry import attention_geometry
from common.config import TimeoutsConfig
from common.messages import Announce, Announced, BlockResults, Commit, Member, Reserve, Reserved
from common.metrics import Metrics
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.types import Role
from services.traffic_manager.store import BlockStoreClient
from tests.transport_support import LOOPS, end, run

GEOMETRY = attention_geometry(num_layers=2, block_size=64, kv_heads=2, head_dim=8, dtype="float32")
SIZE = GEOMETRY.full_block_bytes


class Gateway:
    """It has room for every block, at an address that takes no bytes. Node and link to it in one."""

    def __init__(self, address: str) -> None:
        self.target = RegionDescriptor(bytes(16), 8 * SIZE, "elsewhere", "", address)
        self.given_up = 0

    def link(self, endpoint: str) -> Gateway:
        return self

    async def call(self, msg: object, timeout: float | None) -> object:
        match msg:
            case Announce():
                return Announced([True] * (len(msg.keys) // 32))
            case Reserve():
                return Reserved(self.target, [block * SIZE for block in range(len(msg.keys) // 32)])
            case Commit():
                self.given_up += msg.ok.count(False)
                return BlockResults([False] * len(msg.ok))
        raise AssertionError(msg)


@pytest.mark.parametrize("loop", LOOPS)
def test_blocks_on_their_way_to_a_gateway_that_is_lost_are_given_up_at_once(loop: str) -> None:
    """As when its cable is out: not at the deadline of the transfer. Another gateway's leaving changes nothing."""

    async def scenario() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        gateway: Any = Gateway(f"127.0.0.1:{silent.getsockname()[1]}")
        member = Member(Role.STORAGE_GATEWAY, "gateway", "first", "tcp://127.0.0.1:9", "node", 1)

        async def gone(incarnation: str) -> None:
            raise AssertionError("nobody asked")

        async with end("tcp", transfer_s=100.0) as writer:
            buffer = Memory.create("buffer", 8 * SIZE)
            writer.memories.append(buffer)
            metrics = Metrics()
            store = BlockStoreClient(
                GEOMETRY,
                writer.transport,
                buffer,
                gateway,
                lambda: member,
                gone,
                "us",
                TimeoutsConfig(),
                metrics,
            )
            keys = [blake2b(bytes([block]), digest_size=32).digest() for block in range(3)]
            assert await store.announce(keys) == [True] * 3
            storing = asyncio.create_task(store.store(keys, [0, 1, 2]))
            await asyncio.sleep(0.1)
            store.gateway_left("another")
            await asyncio.sleep(0.1)
            assert not storing.done()
            store.gateway_left("first")
            async with asyncio.timeout(20):
                await storing
            assert gateway.given_up == 3
            assert metrics.snapshot()["storage_failures_total{operation=write}"] == 3
        silent.close()

    run(loop, scenario())
