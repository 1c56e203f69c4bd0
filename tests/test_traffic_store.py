"""A traffic manager's side of storage, when its gateway is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import pytest

from common.blocks.geometry import attention_geometry
from common.config import TimeoutsConfig
from common.errors import DualPathError, ErrorCode
from common.messages import Announce, Announced, BlockResults, Commit, Member, Reserve, Reserved
from common.metrics import Metrics
from common.transport.base import TransferError
from common.transport.memory import Memory
from common.transport.nic import Nic
from common.transport.region import RegionDescriptor
from common.types import Role
from services.traffic_manager.store import BlockStoreClient
from tests.transport_support import LOOPS, End, end, run

GEOMETRY = attention_geometry(num_layers=2, block_size=64, kv_heads=2, head_dim=8, dtype="float32")
SIZE = GEOMETRY.full_block_bytes


class Gateway:
    """It has room for every block, at an address that takes no bytes. Node and link to it in one. leaves: the type of
    the message with whose answer it leaves."""

    def __init__(self, address: str, leaves: type | None = None) -> None:
        self.target = RegionDescriptor(bytes(16), 8 * SIZE, "elsewhere", "", address)
        self.given_up = 0
        self.leave: Callable[[], None] = lambda: None
        self._leaves = leaves
        self._gone = False

    def link(self, endpoint: str) -> Gateway:
        if self._gone:
            raise DualPathError(ErrorCode.UNREACHABLE, "it has left the cluster")
        return self

    async def call(self, msg: object, timeout: float | None) -> object:
        if type(msg) is self._leaves:
            self._gone = True
            self.leave()
        match msg:
            case Announce():
                return Announced([True] * (len(msg.keys) // 32))
            case Reserve():
                return Reserved(self.target, [block * SIZE for block in range(len(msg.keys) // 32)])
            case Commit():
                self.given_up += msg.ok.count(False)
                return BlockResults([False] * len(msg.ok))
        raise AssertionError(msg)


@asynccontextmanager
async def opened(nic: Nic | None = None, leaves: type | None = None) -> AsyncIterator[Opened]:
    """The client of a gateway to which no byte gets, with deadlines that no test waits for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gateway: Any = Gateway(f"127.0.0.1:{silent.getsockname()[1]}", leaves)
        member = Member(Role.STORAGE_GATEWAY, "gateway", "first", "tcp://127.0.0.1:9", "node", 1)

        async def gone(incarnation: str) -> None:
            raise AssertionError("nobody asked")

        async with end("tcp", transfer_s=100.0, nic=nic) as writer:
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
            gateway.leave = lambda: store.gateway_left("first")
            yield Opened(writer, store, gateway, metrics)


@dataclass
class Opened:
    writer: End
    store: BlockStoreClient
    gateway: Gateway
    metrics: Metrics

    @property
    def failures(self) -> float:
        return self.metrics.snapshot()["storage_failures_total{operation=write}"]


KEYS = [blake2b(bytes([block]), digest_size=32).digest() for block in range(3)]


@pytest.mark.parametrize("loop", LOOPS)
def test_blocks_on_their_way_to_a_gateway_that_is_lost_are_given_up_at_once(loop: str) -> None:
    """As when its cable is out: not at the deadline of the transfer. Another gateway's leaving changes nothing."""

    async def scenario() -> None:
        async with opened() as world:
            assert await world.store.announce(KEYS) == [True] * 3
            storing = asyncio.create_task(world.store.store(KEYS, [0, 1, 2]))
            await asyncio.sleep(0.1)
            world.store.gateway_left("another")
            await asyncio.sleep(0.1)
            assert not storing.done()
            world.store.gateway_left("first")
            async with asyncio.timeout(20):
                await storing
            assert world.gateway.given_up == 3
            assert world.failures == 3

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("leaves", [Announce, Reserve])
def test_a_gateway_that_leaves_with_its_answer_is_sent_nothing(loop: str, leaves: type) -> None:
    """We learn of both in one turn of the event loop, and come to the answer last."""

    async def scenario() -> None:
        async with opened(leaves=leaves) as world:
            assert await world.store.announce(KEYS) == [True] * 3
            async with asyncio.timeout(20):
                await world.store.store(KEYS, [0, 1, 2])
            assert world.failures == 3

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_write_that_has_not_begun_is_given_up_as_well(loop: str) -> None:
    async def scenario() -> None:
        async with opened() as world:
            assert await world.store.announce(KEYS) == [True] * 3
            storing = asyncio.create_task(world.store.store(KEYS, [0, 1, 2]))
            await asyncio.sleep(0)
            world.store.gateway_left("first")
            async with asyncio.timeout(20):
                await storing
            assert world.failures == 3

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_write_that_waits_for_its_turn_is_given_up_as_well(loop: str) -> None:
    """On a NIC that is paced, and taken for hours."""

    async def scenario() -> None:
        async with opened(Nic("node/snic", 1.0)) as world:
            other = replace(world.gateway.target, key=bytes([1]) * 16)
            first = world.writer.write(world.store.region, other, (0, 0, SIZE))
            await asyncio.sleep(0.1)
            assert await world.store.announce(KEYS) == [True] * 3
            storing = asyncio.create_task(world.store.store(KEYS, [0, 1, 2]))
            await asyncio.sleep(0.1)
            world.store.gateway_left("first")
            async with asyncio.timeout(20):
                await storing
            assert world.failures == 3
            with pytest.raises(TransferError):
                await first

    run(loop, scenario())
