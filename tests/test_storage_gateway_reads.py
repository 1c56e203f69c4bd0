"""Reads that go wrong, and the fault seams of storage."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import DualPathError
from common.messages import ReadBlocks
from tests.gateway_harness import BLOCK, BUFFER_BLOCKS, gateway_model, keys_of, payload_of, running, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_model(tmp_path_factory.mktemp("model"))


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


async def test_a_slow_nic_does_not_take_the_staging_of_others(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, storage__concurrency=1, timeouts__read_s=3.0) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        names = list(range(12))
        await tm.store(names)
        slow = replace(tm.region, nic="slow/snic", rate=1.0)
        offsets = [slot * BLOCK for slot in names]
        stuck = [asyncio.create_task(tm.link.call(ReadBlocks("r", keys_of(names), slow, offsets), 9)) for _ in range(3)]
        await until(lambda: world.gateway.staging.reads.pool.num_used == 4)
        assert await other.read(names) == [True] * 12
        assert not any(task.done() for task in stuck)
        assert [answer.ok for answer in await asyncio.gather(*stuck)] == [[False] * 12] * 3


# ---- blocks in flight ----


async def test_a_read_waits_for_blocks_that_land_one_after_the_other(model: Path, tmp_path: Path) -> None:
    """Without a slot of staging meanwhile; what lies before them is delivered, what lies behind them comes after."""
    names = list(range(7))
    async with running(model, tmp_path) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.store([0, 1, 4, 6])
        await tm.announce([2, 3, 5])
        reading = asyncio.create_task(other.read(names))
        await until(lambda: other.block(1) == payload_of(1))
        for name in (2, 3, 5):
            await until(lambda: world.gateway.staging.reads.pool.num_used == 0)
            assert not reading.done() and other.block(name) == bytes(BLOCK)
            reserved = await tm.reserve([name])
            await tm.write([name], reserved)
            await tm.commit([name])
            await until(lambda name=name: other.block(name) == payload_of(name))
        assert await reading == [True] * 7
        assert [other.block(slot) for slot in names] == [payload_of(name) for name in names]
        assert world.metric("storage_misses_total") == 0


async def test_a_read_waits_no_longer_than_its_time(model: Path, tmp_path: Path) -> None:
    """A block that does not land is a miss, and those before it are hits."""
    async with running(model, tmp_path, timeouts__read_s=0.5) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "c"])
        await tm.announce(["b"])
        start = time.monotonic()
        assert await tm.read(["a", "b", "c"]) == [True, False, False]
        assert time.monotonic() - start >= 0.4
        await until(lambda: world.gateway.staging.reads.pool.num_used == 0)


@pytest.mark.parametrize("how", ["given up", "writer left", "expired"])
async def test_a_read_does_not_wait_for_what_will_not_come(model: Path, tmp_path: Path, how: str) -> None:
    store_s = 0.2 if how == "expired" else 20
    async with running(model, tmp_path, timeouts__read_s=60.0, timeouts__store_s=store_s) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.store(["a"])
        await tm.announce(["b"])
        if how == "expired":
            await asyncio.sleep(0.25)
        reading = asyncio.create_task(other.read(["a", "b"]))
        await until(lambda: other.block(0) == payload_of("a"))
        if how == "given up":
            assert not reading.done()
            assert await tm.commit(["b"], ok=[False]) == [False]
        elif how == "writer left":
            assert not reading.done()
            await world.leave(tm)
        assert await reading == [True, False]


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
