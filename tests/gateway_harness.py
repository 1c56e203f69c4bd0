"""One storage gateway as its own process would run it, with a scheduler that says yes and traffic managers by hand."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

from common.config import Config, load_config
from common.faults import Faults
from common.messages import (
    Announce,
    Announced,
    BlockResults,
    Commit,
    Done,
    Heartbeat,
    Leave,
    Match,
    Matched,
    Member,
    MemberJoined,
    MemberLeft,
    ReadBlocks,
    Register,
    Registered,
    Reserve,
    Reserved,
)
from common.metrics import Metrics
from common.rpc import Node, Peer
from common.transport.base import Batch, Intent, make_runs
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.types import Role
from services.storage_gateway.service import StorageGateway

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
BLOCK = LAYERS * 64 * 2 * KV_HEADS * HEAD_DIM * 4
BUFFER_BLOCKS = 64


def key_of(name: object) -> bytes:
    return blake2b(str(name).encode(), digest_size=32).digest()


def payload_of(name: object) -> bytes:
    pattern = key_of(f"payload {name}")
    return (pattern * (BLOCK // len(pattern) + 1))[:BLOCK]


def keys_of(names: list[Any]) -> bytes:
    return b"".join(map(key_of, names))


def gateway_model(path: Path) -> Path:
    """A model directory, as far as a control process looks at it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": 32,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


class Scheduler:
    """Says yes to whoever registers, and tells the gateway who comes and goes."""

    def __init__(self, config: Config) -> None:
        self.node = Node("scheduler", config.security, Metrics(), Faults([], "scheduler"))
        self.registered: list[Member] = []

    async def start(self) -> str:
        self.node.on(Register, self._on_register)
        self.node.on(Heartbeat, lambda msg, peer: Done())
        self.node.on(Leave, lambda msg, peer: None)
        return await self.node.bind("tcp://127.0.0.1:*")

    def _on_register(self, msg: Register, peer: Peer) -> Registered:
        self.registered.append(msg.member)
        return Registered(0.2, [])

    def tell(self, gateway: StorageGateway, msg: object) -> None:
        self.node.send_to(gateway.incarnation.encode(), msg)


class TrafficManager:
    """A traffic manager's side of storage, step by step. Block i of the buffer starts at i * BLOCK."""

    def __init__(self, config: Config, name: str, gateway: StorageGateway) -> None:
        self.incarnation = f"{name}.incarnation"
        self.node = Node(self.incarnation, config.security, Metrics(), Faults([], name))
        self.transport = open_transport(config.network, "127.0.0.1", Metrics(), Faults([], name), 10.0)
        self.buffer = Memory.create(name, BUFFER_BLOCKS * BLOCK)
        self.link = self.node.link(gateway.node.endpoint)

    async def start(self) -> None:
        await self.transport.start()
        self.region = self.transport.register(self.buffer)

    async def close(self) -> None:
        await self.transport.close()
        await self.node.close()
        self.buffer.close()

    def block(self, slot: int) -> bytes:
        return bytes(self.buffer.view[slot * BLOCK : (slot + 1) * BLOCK])

    def fill(self, slot: int, payload: bytes) -> None:
        self.buffer.view[slot * BLOCK : (slot + 1) * BLOCK] = payload

    async def match(self, names: list[Any]) -> int:
        answer: Matched = await self.link.call(Match(keys_of(names)), 10)
        return answer.blocks

    async def announce(self, names: list[Any]) -> list[bool]:
        answer: Announced = await self.link.call(Announce(self.incarnation, keys_of(names)), 10)
        return answer.wanted

    async def reserve(self, names: list[Any]) -> Reserved:
        answer: Reserved = await self.link.call(Reserve(self.incarnation, keys_of(names)), 10)
        return answer

    async def write(self, names: list[Any], reserved: Reserved) -> None:
        for slot, name in enumerate(names):
            self.fill(slot, payload_of(name))
        runs = make_runs([slot * BLOCK for slot in range(len(names))], reserved.offsets, BLOCK)
        await self.transport.write(Batch(self.region, reserved.target, runs), Intent.KV_PERSIST)

    async def commit(
        self, names: list[Any], ok: list[bool] | None = None, checksums: list[int] | None = None
    ) -> list[bool]:
        sums = checksums or [xxhash.xxh3_64_intdigest(payload_of(name)) for name in names]
        commit = Commit(self.incarnation, keys_of(names), ok or [True] * len(names), sums)
        answer: BlockResults = await self.link.call(commit, 10)
        return answer.ok

    async def store(self, names: list[Any]) -> list[bool]:
        """All steps, for the blocks that are wanted."""
        wanted = [name for name, want in zip(names, await self.announce(names), strict=True) if want]
        results = []
        while wanted:
            reserved = await self.reserve(wanted)
            batch, wanted = wanted[: len(reserved.offsets)], wanted[len(reserved.offsets) :]
            await self.write(batch, reserved)
            results += await self.commit(batch)
        return results

    async def read(
        self, names: list[Any], request: str = "request", target: RegionDescriptor | None = None
    ) -> list[bool]:
        """Into the first slots of the buffer, or of another region."""
        offsets = [slot * BLOCK for slot in range(len(names))]
        call = ReadBlocks(request, keys_of(names), target or self.region, offsets, self.incarnation)
        answer: BlockResults = await self.link.call(call, 10)
        return answer.ok


class World:
    """A running gateway and everybody around it."""

    def __init__(self, scheduler: Scheduler, gateway: StorageGateway, blocks: Path) -> None:
        self.scheduler = scheduler
        self.gateway = gateway
        self.blocks = blocks
        self.peers: list[TrafficManager] = []

    async def traffic_manager(self, name: str = "tm") -> TrafficManager:
        tm = TrafficManager(self.gateway.config, name, self.gateway)
        self.peers.append(tm)
        await tm.start()
        self.scheduler.tell(self.gateway, MemberJoined(self.member(tm)))
        await until(lambda: tm.incarnation in self.gateway.members)
        return tm

    def member(self, tm: TrafficManager) -> Member:
        return Member(Role.TRAFFIC_MANAGER, tm.incarnation, tm.incarnation, "tcp://127.0.0.1:9", "node", os.getpid())

    async def leave(self, tm: TrafficManager) -> None:
        self.scheduler.tell(self.gateway, MemberLeft(tm.incarnation, tm.incarnation, "test"))
        await until(lambda: tm.incarnation not in self.gateway.members)

    def file(self, name: object) -> Path:
        key = key_of(name).hex()
        return self.blocks / "blocks" / key[:2] / key

    def metric(self, name: str) -> float:
        return self.gateway.metrics.snapshot().get(name, 0)

    @property
    def slots(self) -> tuple[int, int, int]:
        """Free, used and quarantined staging slots for stores."""
        pool = self.gateway.staging.stores.pool
        return pool.num_free, pool.num_used, pool.num_quarantined


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def gateway_config(model: Path, blocks: Path, **overrides: Any) -> Config:
    values: dict[str, Any] = {
        "model.path": str(model),
        "storage.path": str(blocks),
        "storage.staging": 16 * BLOCK,
        "storage.concurrency": 4,
        "timeouts.lookup_s": 1.0,
        "timeouts.drain_s": 2.0,
        "timeouts.register_s": 5.0,
    }
    return load_config(None, values | {name.replace("__", "."): value for name, value in overrides.items()})


@asynccontextmanager
async def running(model: Path, blocks: Path, **overrides: Any) -> AsyncIterator[World]:
    """One gateway with a scheduler; whatever happens, its pools are whole and empty at the end."""
    scheduler = Scheduler(load_config())
    control = await scheduler.start()
    gateway = StorageGateway(gateway_config(model, blocks, scheduler__control=control, **overrides), "gateway")
    world = World(scheduler, gateway, blocks)
    try:
        await gateway.start()
        yield world
        gateway.staging.check_integrity()
        await until(lambda: gateway.staging.reads.pool.num_used == 0)
    finally:
        for tm in world.peers:
            await tm.close()
        await gateway.stop(drain=False)
        await scheduler.node.close()
