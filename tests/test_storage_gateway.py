"""The storage gateway over real sockets, transports and files: stores, lookups, reads, and its life as a process."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tests.gateway_harness import BLOCK, gateway_model, payload_of, running, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_model(tmp_path_factory.mktemp("model"))


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
        assert world.metric("block_store_read_bytes_total") == 30 * BLOCK
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
            work: list[Coroutine[Any, Any, object]] = []
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
