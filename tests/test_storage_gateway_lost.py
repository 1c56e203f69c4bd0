"""Callers that are lost: what the gateway does for them ends when it learns of that, not at a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import DualPathError, ErrorCode
from common.transport.region import RegionDescriptor
from tests.gateway_harness import TrafficManager, World, gateway_model, payload_of, running, until

#: Deadlines that no test waits for.
PATIENT = {f"timeouts__{name}": 100.0 for name in ("read_s", "store_s", "transfer_s")}
NAMES = list(range(12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and bytes, and answers nothing: a host whose cable is out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(params=["staging", "files"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through staging, or straight from the files."""
    if request.param == "files":
        monkeypatch.setattr("services.storage_gateway.reader.DIRECT_BYTES", 1)
    return str(request.param)


def elsewhere(tm: TrafficManager, address: str) -> RegionDescriptor:
    """Its region, on another host."""
    return replace(tm.region, host="elsewhere", shm="", address=address, verbs="", nic="node/snic")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def turns(world: World) -> int:
    """Free turns of the NIC."""
    return world.gateway._reader._turns["node/snic"]._value


async def fails_as_lost(call: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    with pytest.raises(DualPathError) as caught:
        async with asyncio.timeout(5):
            await call
    assert caught.value.code is ErrorCode.ENGINE_LOST


async def test_a_read_for_a_lost_caller_ends_at_once(
    model: Path, tmp_path: Path, silent: str, way: str
) -> None:
    """Staging, turns of the NIC and open files are there for others then; a read for somebody else goes on."""
    async with running(model, tmp_path, storage__concurrency=2, **PATIENT) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await other.store(NAMES)
        assert await other.read(NAMES, target=replace(other.region, nic="node/snic")) == [True] * 12
        before = open_files()
        reading = asyncio.create_task(tm.read(NAMES, target=elsewhere(tm, silent)))
        await until(lambda: turns(world) == 0)
        behind = asyncio.create_task(other.read(NAMES, target=replace(other.region, nic="node/snic")))
        await asyncio.sleep(0.1)
        assert not reading.done() and not behind.done()
        await world.leave(tm)
        await fails_as_lost(reading)
        async with asyncio.timeout(5):
            assert await behind == [True] * 12
        assert [other.block(slot) for slot in NAMES] == [payload_of(name) for name in NAMES]
        await until(lambda: turns(world) == 2 and world.gateway.staging.in_use == 0 and open_files() == before)


async def test_a_gateway_that_stops_does_not_wait_for_a_silent_caller(
    model: Path, tmp_path: Path, silent: str, way: str
) -> None:
    async with running(model, tmp_path, storage__concurrency=2, **PATIENT) as world:
        tm = await world.traffic_manager("tm")
        await tm.store(NAMES)
        before = open_files()
        reading = asyncio.create_task(tm.read(NAMES, target=elsewhere(tm, silent)))
        await until(lambda: "node/snic" in world.gateway._reader._turns and turns(world) == 0)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            await world.gateway.stop(drain=False)
        assert open_files() < before
        assert world.gateway.staging.reads.pool.num_used == 0
        reading.cancel()


async def test_one_that_waits_for_a_paced_nic_ends_at_once(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, **PATIENT) as world:
        tm = await world.traffic_manager()
        await tm.store(NAMES)
        reading = asyncio.create_task(tm.read(NAMES, target=replace(tm.region, nic="node/snic", rate=1.0)))
        await until(lambda: world.gateway.staging.in_use > 0)
        await world.leave(tm)
        await fails_as_lost(reading)
        await until(lambda: world.gateway.staging.in_use == 0)


async def test_one_that_waits_for_a_block_in_flight_ends_at_once(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, **PATIENT) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await other.store(["a"])
        await other.announce(["b"])
        reading = asyncio.create_task(tm.read(["a", "b"]))
        await until(lambda: tm.block(0) == payload_of("a"))
        await world.leave(tm)
        await fails_as_lost(reading)
        await other.commit(["b"], ok=[False])


@pytest.mark.parametrize("how", ["lost", "late"])
async def test_one_that_waits_for_staging_gives_back_its_turn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Blocks that cannot go straight from their files: when the caller is lost, or the read's time is over."""
    monkeypatch.setattr("services.storage_gateway.reader.DIRECT_BYTES", 1)
    patience = {"timeouts__read_s": 0.3} if how == "late" else PATIENT
    async with running(model, tmp_path, storage__concurrency=1, storage__verify=False, **patience) as world:
        tm = await world.traffic_manager()
        await tm.store(["a"])
        lane = world.gateway.staging.reads
        held = await lane.take(lane.pool.total, lane.pool.total)
        reading = asyncio.create_task(tm.read(["a"], target=replace(tm.region, nic="node/snic")))
        await until(lambda: "node/snic" in world.gateway._reader._turns and turns(world) == 0)
        if how == "lost":
            await world.leave(tm)
            await fails_as_lost(reading)
        else:
            assert await reading == [False]
        await until(lambda: turns(world) == 1)
        lane.give_back(held)


async def test_what_a_lost_caller_still_asks_for_is_refused(model: Path, tmp_path: Path) -> None:
    """Its last message may come after the word that it has left."""
    async with running(model, tmp_path, **PATIENT) as world:
        tm = await world.traffic_manager()
        await tm.store(["a"])
        await world.leave(tm)
        await fails_as_lost(tm.read(["a"]))
        assert world.metric("storage_blocks_read_total") == 0


async def test_a_lost_writer_that_waits_for_places_keeps_nobody_out(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, **PATIENT) as world:
        one, tm, other = [await world.traffic_manager(name) for name in ("one", "tm", "other")]
        await one.announce(list(range(8)))
        await one.reserve(list(range(8)))
        await tm.announce(["a", "b"])
        await other.announce(["c"])
        waiting = asyncio.create_task(tm.reserve(["a", "b"]))
        await until(world.gateway.staging.stores._turn.locked)
        behind = asyncio.create_task(other.reserve(["c"]))
        await one.commit([0], ok=[False])  # room for one block
        await asyncio.sleep(0.1)
        assert not waiting.done() and not behind.done()
        await world.leave(tm)
        await fails_as_lost(waiting)
        async with asyncio.timeout(5):
            assert len((await behind).offsets) == 1
        await world.leave(one)
        await world.leave(other)
        assert world.slots == (8, 0, 0)
