"""Blocks that go straight from their files, and when they do not: misses, damage, a cold page cache, faults."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from common.storage.directory import DirectoryStore
from services.storage_gateway.reader import DIRECT_BATCH_BLOCKS
from tests.gateway_harness import BLOCK, World, gateway_model, payload_of, running, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def blocks_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.storage_gateway.reader.DIRECT_BYTES", 1)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each read of the store brought into staging."""
    counts: list[int] = []
    real = DirectoryStore.read

    async def read(self: Any, keys: Any, into: Any) -> list[bool]:
        counts.append(len(keys))
        return await real(self, keys, into)

    monkeypatch.setattr(DirectoryStore, "read", read)
    return counts


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def served(world: World) -> float:
    return world.metric("block_store_read_bytes_total")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_cached_blocks_are_not_staged(model: Path, tmp_path: Path, staged: list[int], transport: str) -> None:
    names = list(range(20))
    async with running(model, tmp_path, network__transport=transport) as world:
        tm = await world.traffic_manager()
        await tm.store(names)
        assert await tm.read(names[:1]) == [True]
        before = open_files()
        assert await tm.read(names) == [True] * 20
        assert [tm.block(slot) for slot in names] == [payload_of(name) for name in names]
        assert staged == [] and open_files() == before and served(world) == 21 * BLOCK


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_damaged_block_is_a_miss_and_set_aside(
    model: Path, tmp_path: Path, staged: list[int], transport: str
) -> None:
    """It is noticed where it arrives. What was sent with it is read again, one way or the other."""
    async with running(model, tmp_path, network__transport=transport) as world:
        tm = await world.traffic_manager()
        await tm.store(list(range(4)))
        with world.file(2).open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"spoil")
        assert await tm.read(list(range(4))) == [True, True, False, True]
        assert [tm.block(slot) for slot in (0, 1, 3)] == [payload_of(name) for name in (0, 1, 3)]
        assert not world.file(2).exists()
        assert world.metric("storage_blocks_quarantined_total{reason=checksum}") == 1
        assert await tm.read([0, 1]) == [True, True] and served(world) == 5 * BLOCK


async def test_misses_and_foreign_files_are_what_they_are_on_the_other_way(
    model: Path, tmp_path: Path, staged: list[int]
) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(["a", "b", "c"])
        world.file("b").unlink()
        os.truncate(world.file("c"), 100)
        assert (await tm.read(["a", "b", "c"]))[:2] == [True, False]
        assert staged and world.metric("storage_misses_total") >= 1


async def test_what_is_not_in_the_page_cache_is_read_by_the_stores_own_threads(
    model: Path, tmp_path: Path, staged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def cold(fd: int, places: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        return real(fd, places, offset, flags)

    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(list(range(6)))
        assert await tm.read([0]) == [True]
        monkeypatch.setattr(os, "preadv", cold)
        before = open_files()
        assert await tm.read(list(range(6))) == [True] * 6
        assert sum(staged) == 6 and open_files() == before


async def test_storage_that_is_not_verified_goes_through_staging(
    model: Path, tmp_path: Path, staged: list[int]
) -> None:
    async with running(model, tmp_path, storage__verify=False) as world:
        tm = await world.traffic_manager()
        await tm.store(["a"])
        assert await tm.read(["a"]) == [True] and sum(staged) == 1


async def test_a_batch_opens_so_many_files_at_most(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: list[int]
) -> None:
    real, opened = DirectoryStore.open_parts, []

    async def counting(self: DirectoryStore, keys: Any) -> Any:
        opened.append(len(keys))
        return await real(self, keys)

    monkeypatch.setattr(DirectoryStore, "open_parts", counting)
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.store(list(range(60)))
        assert await tm.read(list(range(60))) == [True] * 60
    assert opened == [1, DIRECT_BATCH_BLOCKS, 60 - 1 - DIRECT_BATCH_BLOCKS] and not staged


@pytest.mark.parametrize(("action", "ok"), [("fail", False), ("corrupt", False), ("delay", True)])
async def test_fault_seams_strike_here_too(model: Path, tmp_path: Path, action: str, ok: bool) -> None:
    faults = [{"point": "storage.read", "action": action, "block": 1, "seconds": 0.05, "times": 1}]
    async with running(model, tmp_path, faults=faults) as world:
        tm = await world.traffic_manager()
        await tm.store([0, 1, 2])
        assert await tm.read([0, 1, 2]) == [True, ok, True]


async def test_a_transfer_that_fails_is_tried_once_more_through_staging(
    model: Path, tmp_path: Path, staged: list[int]
) -> None:
    faults = [{"point": "transfer", "action": "fail", "type": "kv_load", "times": 1}]
    async with running(model, tmp_path, faults=faults) as world:
        tm = await world.traffic_manager()
        await tm.store([0, 1])
        assert await tm.read([0, 1]) == [True, True]
        assert sum(staged) == 1  # the first block goes alone


async def test_a_file_system_that_hangs_while_files_are_opened_keeps_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gives at last is closed."""
    real, goes_on, opened = DirectoryStore._open_part, threading.Event(), threading.Semaphore(0)

    def hangs(self: DirectoryStore, key: bytes) -> Any:
        goes_on.wait(20)
        opened.release()
        return real(self, key)

    async with running(model, tmp_path, timeouts__read_s=0.5) as world:
        tm = await world.traffic_manager()
        await tm.store([0, 1])
        assert await tm.read([0, 1]) == [True, True]
        before = open_files()
        monkeypatch.setattr(DirectoryStore, "_open_part", hangs)
        try:
            async with asyncio.timeout(5):
                assert await tm.read([0, 1]) == [False, False]
        finally:
            goes_on.set()
        assert opened.acquire(timeout=5)
        await until(lambda: open_files() == before)
        assert await tm.read([0, 1]) == [True, True]
