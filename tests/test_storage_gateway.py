"""The storage gateway as a process of its own would run: real control plane, real transports, real files."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import xxhash

from common.config import Config, load_config
from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Faults
from common.messages import (
    Announce,
    Announced,
    BlockResults,
    Commit,
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
from common.transport.select import open_transport
from common.types import Role
from services.storage_gateway.service import StorageGateway
from services.storage_gateway.staging import Staging

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as far as a control process looks at it."""
    path = tmp_path_factory.mktemp("model")
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
        self.node.on(Heartbeat, lambda msg, peer: None)
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

    async def read(self, names: list[Any], request: str = "request") -> list[bool]:
        """Into the first slots of the buffer."""
        offsets = [slot * BLOCK for slot in range(len(names))]
        answer: BlockResults = await self.link.call(ReadBlocks(request, keys_of(names), self.region, offsets), 10)
        return answer.ok


class World:
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


# ---- the ordinary life of blocks ----


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_blocks_are_stored_matched_and_read_also_after_a_restart(
    model: Path, tmp_path: Path, transport: str
) -> None:
    names = list(range(30))  # more than staging holds at a time
    async with running(model, tmp_path, network__transport=transport) as world:
        tm = await world.traffic_manager()
        assert await tm.match(names) == 0
        assert await tm.store(names) == [True] * 30
        assert await tm.match(names) == 30
        assert world.slots == (8, 0, 0)
    async with running(model, tmp_path, network__transport=transport) as world:
        tm = await world.traffic_manager()
        assert await tm.match([*names, "new"]) == 30
        assert await tm.read(names) == [True] * 30
        assert [tm.block(slot) for slot in names] == [payload_of(name) for name in names]
        assert world.metric("storage_bytes_read_total") == 30 * BLOCK
        assert world.metric("storage_staging_slots_free") == 16
        assert world.metric("storage_blocks_in_flight") == 0
        assert [member.manifest for member in world.scheduler.registered] == [world.gateway.manifest]


async def test_a_match_is_a_prefix(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "b", "d"])
        assert await tm.match(["a", "b", "c", "d"]) == 2
        assert await tm.match(["c", "a"]) == 0
        assert await tm.match([]) == 0


async def test_a_read_keeps_the_valid_prefix(model: Path, tmp_path: Path) -> None:
    names = list(range(20))
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(names)
        world.file(13).write_bytes(b"")
        ok = await tm.read(names)
        assert len(ok) == 20 and all(ok[:13]) and not ok[13]
        assert [tm.block(slot) for slot in range(13)] == [payload_of(name) for name in range(13)]
        # where the answer is yes after the miss, the block is there all the same
        assert all(tm.block(slot) == payload_of(slot) for slot in range(20) if ok[slot])
        assert world.metric("storage_misses_total") == 1
        assert world.metric("storage_blocks_quarantined_total{reason=size}") == 1
        assert await tm.match(names) == 13
        # the gateway is well: the rest of the blocks is read, and the lost one can be stored again
        assert await tm.read(names[14:]) == [True] * 6
        assert await tm.store(names) == [True]
        assert await tm.match(names) == 20


async def test_a_read_after_a_miss_stops(model: Path, tmp_path: Path) -> None:
    """Nothing is read once it is known to be of no use."""
    names = list(range(40))
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(names[1:])
        assert not (await tm.read(names))[0]
        assert world.metric("storage_blocks_read_total") < 20


async def test_reads_at_once_share_staging(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, storage__staging=2 * BLOCK) as world:
        peers = [await world.traffic_manager(f"tm{i}") for i in range(4)]
        await peers[0].store(list(range(10)))
        results = await asyncio.gather(*(tm.read(list(range(10))) for tm in peers))
        assert results == [[True] * 10] * 4
        for tm in peers:
            assert [tm.block(slot) for slot in range(10)] == [payload_of(name) for name in range(10)]


# ---- blocks in flight ----


async def test_a_block_is_wanted_from_one_writer_only(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        one, two = await world.traffic_manager("one"), await world.traffic_manager("two")
        assert await one.announce(["a", "b", "a"]) == [True, True, False]
        assert await two.announce(["b", "c"]) == [False, True]
        assert world.metric("storage_blocks_in_flight") == 3
        reserved = await one.reserve(["a", "b"])
        await one.write(["a", "b"], reserved)
        assert await one.commit(["a", "b"]) == [True, True]
        assert await two.announce(["a", "b", "d"]) == [False, False, True]
        assert world.metric("storage_blocks_in_flight") == 2  # nobody waits for what is stored already


async def test_a_match_waits_for_a_block_in_flight(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, timeouts__lookup_s=5.0) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.store(["a"])
        await tm.announce(["b", "c"])
        matching = asyncio.create_task(other.match(["a", "b", "c", "d"]))
        reserved = await tm.reserve(["b", "c"])
        await tm.write(["b", "c"], reserved)
        await asyncio.sleep(0.05)
        assert not matching.done()
        await tm.commit(["b", "c"])
        assert await matching == 3


async def test_a_match_waits_for_blocks_that_land_one_after_the_other(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, timeouts__lookup_s=5.0) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        names = list(range(5))
        await tm.announce(names)
        matching = asyncio.create_task(other.match(names))
        for name in names:
            assert not matching.done()
            reserved = await tm.reserve([name])
            await tm.write([name], reserved)
            await tm.commit([name])
            await asyncio.sleep(0.01)
        assert await matching == 5


async def test_a_match_waits_no_longer_than_its_time(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, timeouts__lookup_s=1.0) as world:
        tm = await world.traffic_manager()
        await tm.store(["a"])
        await tm.announce(["b"])
        start = time.monotonic()
        assert await tm.match(["a", "b"]) == 1
        assert 0.7 < time.monotonic() - start < 2
        # nobody waits for a block further on
        start = time.monotonic()
        assert await tm.match(["a", "x", "b"]) == 1
        assert time.monotonic() - start < 0.6


@pytest.mark.parametrize("how", ["given up", "writer left", "expired"])
async def test_a_match_does_not_wait_for_what_will_not_come(model: Path, tmp_path: Path, how: str) -> None:
    store_s = 0.3 if how == "expired" else 20
    async with running(model, tmp_path, timeouts__lookup_s=8.0, timeouts__store_s=store_s) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.announce(["a"])
        if how == "expired":
            await asyncio.sleep(0.35)
        matching = asyncio.create_task(other.match(["a"]))
        await asyncio.sleep(0.05)
        if how == "given up":
            assert not matching.done()
            assert await tm.commit(["a"], ok=[False]) == [False]
        elif how == "writer left":
            assert not matching.done()
            await world.leave(tm)
        async with asyncio.timeout(2):
            assert await matching == 0
        assert await other.announce(["a"]) == [True]


# ---- stores that go wrong ----


async def test_a_block_that_arrives_otherwise_than_sent_is_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.announce(["a", "b"])
        await tm.write(["a", "b"], await tm.reserve(["a", "b"]))
        right = xxhash.xxh3_64_intdigest(payload_of("a"))
        assert await tm.commit(["a", "b"], checksums=[right, 1]) == [True, False]
        assert world.metric("storage_refused_puts_total") == 1
        assert await tm.match(["a", "b"]) == 1
        assert await tm.announce(["a", "b"]) == [False, True]
        assert world.slots == (8, 0, 0)


async def test_results_are_aligned_when_single_blocks_fail(model: Path, tmp_path: Path) -> None:
    """Sixteen blocks, of which one is stored already and one cannot be written."""
    names = [f"b{i}" for i in range(16)]
    async with running(model, tmp_path, storage__staging=40 * BLOCK) as world:
        tm = await world.traffic_manager()
        await tm.store(["b5"])
        obstacle = world.file("b9").parent
        assert not obstacle.exists()
        obstacle.write_text("a file in the place of b9's sub-directory")
        wanted = await tm.announce(names)
        assert wanted == [i != 5 for i in range(16)]
        sent = [name for name, want in zip(names, wanted, strict=True) if want]
        await tm.write(sent, await tm.reserve(sent))
        assert await tm.commit(sent) == [name != "b9" for name in sent]
        assert await tm.match(names) == 9
        assert await tm.match(names[10:]) == 6
        obstacle.unlink()
        assert await tm.store(names) == [True]
        assert await tm.match(names) == 16


async def test_a_writer_that_leaves_gives_back_its_places(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        names = list(range(8))
        await tm.announce(names)
        await tm.reserve(names)
        assert world.slots == (0, 8, 0)
        waiting = asyncio.create_task(other.store(["x"]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await world.leave(tm)
        assert await waiting == [True]
        assert world.slots == (8, 0, 0)
        for call in (tm.announce(["y"]), tm.reserve(names)):
            with pytest.raises(DualPathError) as caught:
                await call
            assert caught.value.code is ErrorCode.ENGINE_LOST
        assert await other.store(names) == [True] * 8


async def test_a_stalled_writers_places_are_quarantined_until_it_is_known_to_be_quiet(
    model: Path, tmp_path: Path
) -> None:
    async with running(model, tmp_path, timeouts__store_s=0.3) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.announce(["a", "b"])
        reserved = await tm.reserve(["a", "b"])
        await asyncio.sleep(0.35)
        # others go on, in other places, and their reads are not affected
        assert await other.store(["a"]) == [True]
        assert world.slots == (6, 0, 2)
        assert await other.read(["a"]) == [True]
        # too late, but now the writer is known to be done with one place
        await tm.write(["a"], Reserved(reserved.target, reserved.offsets[:1]))
        assert await tm.commit(["a"]) == [False]
        assert world.slots == (7, 0, 1)
        await world.leave(tm)
        assert world.slots == (8, 0, 0)


async def test_places_are_given_in_order_and_not_for_ever(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, timeouts__store_s=0.5) as world:
        tm = await world.traffic_manager()
        await tm.announce([*range(8), "first", "second", "third"])
        await tm.reserve(list(range(8)))
        first = asyncio.create_task(tm.reserve(["first"]))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(tm.reserve(["second"]))
        await asyncio.sleep(0.02)
        await tm.commit([3], ok=[False])
        await first
        assert not second.done()
        start = time.monotonic()
        with pytest.raises(DualPathError, match="no staging within") as caught:
            await second
        assert caught.value.code is ErrorCode.STORAGE_FAILED
        assert time.monotonic() - start < 3
        await world.leave(tm)


async def test_a_reservation_larger_than_staging_is_filled_in_part(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, storage__staging=6 * BLOCK) as world:
        tm = await world.traffic_manager()
        await tm.announce(list(range(10)))
        assert len((await tm.reserve(list(range(10)))).offsets) == 3
        await tm.commit(list(range(3)), ok=[False] * 3)


async def test_calls_out_of_order_are_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        with pytest.raises(DualPathError, match="not announced"):
            await tm.reserve(["a"])
        await tm.announce(["a", "b"])
        with pytest.raises(DualPathError, match="not announced"):
            await other.reserve(["a"])
        reserved = await tm.reserve(["a"])
        for names in (["a"], ["b", "b"]):
            with pytest.raises(DualPathError, match="has a place already") as caught:
                await tm.reserve(names)
            assert caught.value.code is ErrorCode.MALFORMED
        assert await other.commit(["a"]) == [False]  # not other's to commit: nothing happens
        await tm.write(["a"], reserved)
        assert await tm.commit(["a"]) == [True]
        assert await tm.commit(["a"]) == [False]  # once only
        await tm.commit(["b"], ok=[False])


async def test_malformed_calls_are_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        for call in (
            Match(b"short"),
            ReadBlocks("r", keys_of(["a"]), tm.region, []),
            Commit(tm.incarnation, keys_of(["a"]), [True, True], [0]),
            Announce(tm.incarnation, b"x" * 33),
        ):
            with pytest.raises(DualPathError) as caught:
                await tm.link.call(call, 5)
            assert caught.value.code is ErrorCode.MALFORMED


async def test_a_lane_lets_nobody_overtake() -> None:
    """However little the next one wants: else whoever wants much would wait for ever."""
    staging = Staging(8, 1)
    try:
        held = await staging.stores.take(3, 3)
        large = asyncio.create_task(staging.stores.take(3, 3))
        await asyncio.sleep(0)
        small = asyncio.create_task(staging.stores.take(1, 1))
        await asyncio.sleep(0.01)
        assert not large.done() and not small.done()
        gone = asyncio.create_task(staging.stores.take(1, 1))
        await asyncio.sleep(0)
        gone.cancel()
        staging.stores.give_back(held)
        assert len(await large) == 3 and len(await small) == 1
        staging.check_integrity()
        assert staging.stores.pool.num_used == 4
    finally:
        staging.close()


# ---- reads that go wrong ----


async def test_a_target_out_of_range_gets_nothing(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "b"])
        end = BUFFER_BLOCKS * BLOCK
        answer = await tm.link.call(ReadBlocks("r", keys_of(["a", "b"]), tm.region, [0, end - 1]), 5)
        assert answer.ok == [False, False]
        assert await tm.read(["a", "b"]) == [True, True]


async def test_a_store_that_hangs_costs_a_read_its_time_and_no_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    async with running(model, tmp_path, timeouts__read_s=0.4) as world:
        tm = await world.traffic_manager()
        await tm.store(list(range(12)))
        real_open = os.open

        def hang(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if str(path) == str(world.file(2)):
                assert go_on.wait(20)
            return real_open(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", hang)
        for slot in range(12):
            tm.fill(slot, bytes(BLOCK))
        start = time.monotonic()
        ok = await tm.read(list(range(12)))
        assert time.monotonic() - start < 3
        # the block hangs, and with it its batch of four; lookups and the loop do not
        assert ok == [False] * 4 + [True] * 8
        assert await tm.match([0, 1, 2]) == 3
        assert world.gateway.staging.reads.pool.num_used == 4
        go_on.set()
        await until(lambda: world.gateway.staging.reads.pool.num_used == 0)
        # after the answer nothing was written any more
        assert all(tm.block(slot) == bytes(BLOCK) for slot in range(4))
        assert await tm.read(list(range(12))) == [True] * 12


async def test_a_transfer_that_hangs_is_stopped_before_the_answer(model: Path, tmp_path: Path) -> None:
    faults = [{"point": "transfer", "action": "delay", "type": "kv_load", "seconds": 30.0}]
    async with running(model, tmp_path, timeouts__read_s=0.3, faults=faults) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "b"])
        start = time.monotonic()
        assert await tm.read(["a", "b"]) == [False, False]
        assert time.monotonic() - start < 3
        await until(lambda: world.gateway.staging.reads.pool.num_used == 0)
        assert await tm.read(["a", "b"]) == [True, True]


# ---- fault seams ----


def fault(point: str, action: str, **more: Any) -> list[dict[str, Any]]:
    return [{"point": point, "action": action, **more}]


async def test_a_read_can_be_made_to_fail_by_request_and_block(model: Path, tmp_path: Path) -> None:
    faults = fault("storage.read", "fail", request="chosen", block=2)
    async with running(model, tmp_path, faults=faults) as world:
        tm = await world.traffic_manager()
        await tm.store(list(range(4)))
        assert await tm.read(list(range(4)), "another") == [True] * 4
        assert await tm.read(list(range(4)), "chosen") == [True, True, False, True]
        assert await tm.read(list(range(4)), "chosen") == [True] * 4


async def test_a_write_can_be_made_to_fail_by_block(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, faults=fault("storage.write", "fail", block=1)) as world:
        tm = await world.traffic_manager()
        assert await tm.store(["a", "b", "c"]) == [True, False, True]
        assert await tm.match(["a", "b"]) == 1
        assert await tm.store(["a", "b", "c"]) == [True]


async def test_a_lookup_can_be_made_to_fail_or_to_take_long(model: Path, tmp_path: Path) -> None:
    faults = fault("storage.match", "fail") + fault("storage.match", "delay", seconds=0.2, after=1)
    async with running(model, tmp_path, faults=faults) as world:
        tm = await world.traffic_manager()
        with pytest.raises(DualPathError, match="configuration"):
            await tm.match(["a"])
        assert await tm.match(["a"]) == 0
        start = time.monotonic()
        assert await tm.match(["a"]) == 0
        assert time.monotonic() - start > 0.19


@pytest.mark.parametrize("point", ["storage.read", "storage.write"])
async def test_a_corrupted_block_is_noticed_by_its_checksum(model: Path, tmp_path: Path, point: str) -> None:
    async with running(model, tmp_path, faults=fault(point, "corrupt", block=1)) as world:
        tm = await world.traffic_manager()
        assert await tm.store(["a", "b"]) == [True, True]
        assert await tm.read(["a", "b"]) == [True, False]
        assert world.metric("storage_blocks_quarantined_total{reason=checksum}") == 1
        assert await tm.match(["a", "b"]) == 1


@pytest.mark.parametrize("point", ["storage.read", "storage.write"])
async def test_without_verification_a_corrupted_block_is_delivered(model: Path, tmp_path: Path, point: str) -> None:
    faults = fault(point, "corrupt", block=1)
    async with running(model, tmp_path, faults=faults, storage__verify=False) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "b"])
        assert await tm.read(["a", "b"]) == [True, True]
        assert tm.block(0) == payload_of("a")
        differing = [i for i, (x, y) in enumerate(zip(tm.block(1), payload_of("b"), strict=True)) if x != y]
        assert differing == [BLOCK - 1]


# ---- life of the process ----


async def test_draining_takes_in_what_was_announced(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.announce(["a"])
        reserved = await tm.reserve(["a"])
        draining = asyncio.create_task(world.gateway.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        await tm.write(["a"], reserved)
        assert await tm.commit(["a"]) == [True]
        async with asyncio.timeout(1):
            await draining


async def test_nothing_is_left_over(model: Path, tmp_path: Path) -> None:
    """Stores, reads, misses, give-ups, leavers, and a stop in the middle of it: descriptors and tasks as before."""

    async def mixture(stop_early: bool) -> None:
        async with running(model, tmp_path, storage__staging=6 * BLOCK) as world:
            peers = [await world.traffic_manager(f"tm{i}") for i in range(3)]
            work = []
            for round in range(5):
                names = [f"{round}.{i}" for i in range(10)]
                work += [tm.store(names) for tm in peers]
                work += [tm.read(names) for tm in peers]
                work += [tm.match(names) for tm in peers]
            tasks = [asyncio.create_task(job) for job in work]
            if stop_early:
                await asyncio.sleep(0.02)
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=stop_early)
            await asyncio.sleep(0.05)
            for tm in peers:
                await world.leave(tm)
            await until(lambda: world.gateway.staging.in_use == 0)
            assert world.gateway.staging.num_free == 6 and len(world.gateway.in_flight) == 0
            world.gateway.staging.check_integrity()

    await mixture(stop_early=False)  # what is opened once and kept, zmq's context above all
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    await mixture(stop_early=True)
    await mixture(stop_early=False)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await until(lambda: len(asyncio.all_tasks()) == tasks)


@pytest.mark.parametrize(
    ("override", "value", "message"),
    [
        ("storage__staging", 2 * BLOCK - 1, "storage.staging"),
        ("storage__path", "", "storage.path is not set"),
        ("storage__path", "/proc/self", "not writable"),
        ("storage__path", __file__, "is not a directory"),
    ],
)
async def test_a_start_that_cannot_go_well_is_refused_in_one_line(
    model: Path, tmp_path: Path, override: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        async with running(model, tmp_path, **{override: value}):
            pass
    assert "\n" not in str(caught.value)


async def test_a_directory_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"another model.*model_digest"):
        async with running(model, tmp_path, model__digest="other"):
            pass
    async with running(model, tmp_path):
        pass


def test_the_gateway_needs_no_torch() -> None:
    check = "import sys, services.storage_gateway.service; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
