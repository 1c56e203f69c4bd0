"""The contract of common.transport.base: how transfers, regions and whole transports end, on both event loops."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from dataclasses import replace

import pytest

from common.transport.base import Batch, Intent, TransferError, make_runs
from common.transport.copier import Copier, Stop, copy
from common.transport.memory import Memory
from common.transport.mover import Job
from tests.transport_support import MIB, MOVING, End, done, each_kind, each_loop, end, noise, pair, run


@each_loop
@each_kind
def test_cancel_returns_when_both_memories_are_quiet(loop: str, kind: str) -> None:
    """And what else is under way to the same peer completes."""

    async def scenario() -> None:
        size = 32 * MIB
        async with pair(kind) as (writer, peer):
            source, from_memory = writer.region(size, 1)
            target, memory = peer.region(size)
            other, other_memory = peer.region(size)
            for ticks in (0, 1, 5, 20):
                doomed = writer.copy(source, target)
                bystander = writer.copy(source, other)
                for _ in range(ticks):
                    await asyncio.sleep(0.0002)
                await doomed.cancel()
                before = bytes(memory.view)
                await bystander
                assert bytes(other_memory.view) == bytes(from_memory.view)
                assert bytes(memory.view) == before
                await doomed.cancel()
                other_memory.view[:] = bytes(size)

    run(loop, scenario())


@each_loop
@each_kind
def test_whoever_cancels_is_not_back_before_that_even_if_cancelled(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(32 * MIB, 1)
            target, _ = peer.region(32 * MIB)
            for ticks in (1, 5, 20):
                doomed = writer.copy(source, target)
                for _ in range(ticks):
                    await asyncio.sleep(0.0002)
                cancelling = asyncio.ensure_future(doomed.cancel())
                for _ in range(2):
                    await asyncio.sleep(0)
                    cancelling.cancel()
                await asyncio.wait({cancelling})
                assert doomed.task.done()

    run(loop, scenario())


@each_loop
@each_kind
def test_a_caller_that_stops_waiting_does_not_stop_the_transfer(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(8 * MIB, 1)
            target, memory = peer.region(8 * MIB)
            transfer = writer.copy(source, target)
            waiter = asyncio.ensure_future(done(transfer))
            await asyncio.sleep(0)
            waiter.cancel()
            await transfer
            await transfer.cancel()  # done stays done
            await transfer
            assert memory.view[-1] == 1

    run(loop, scenario())


@each_loop
@each_kind
def test_after_deregister_nothing_is_written(loop: str, kind: str) -> None:
    async def scenario() -> None:
        size = 32 * MIB
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(size, 1)
            target, memory = peer.region(size)
            await writer.write(source, target, (0, 0, 10))
            transfer = writer.copy(source, target)
            await asyncio.sleep(0.001)
            await peer.transport.deregister(target)
            before = bytes(memory.view)
            try:
                await transfer
            except TransferError:
                pass
            else:
                assert before == bytes([1]) * size
            with pytest.raises(TransferError):
                await writer.copy(source, target)
            assert bytes(memory.view) == before
            await peer.transport.deregister(target)
            again = peer.transport.register(memory)
            assert again.key != target.key
            with pytest.raises(TransferError):
                await writer.copy(source, target)
            await writer.copy(source, again)
            assert bytes(memory.view) == bytes([1]) * size

    run(loop, scenario())


@each_kind
def test_deregister_of_a_source_waits_for_its_transfers(kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(8 * MIB, 1)
            target, memory = peer.region(8 * MIB)
            transfer = writer.copy(source, target)
            await writer.transport.deregister(source)
            assert memory.view[-1] == 1
            await transfer
            with pytest.raises(TransferError):
                writer.copy(source, target)

    run("uvloop", scenario())


@each_loop
@pytest.mark.parametrize("kind", [*MOVING, "auto", "null"])
def test_close_in_mid_transfer_leaves_nothing_behind(loop: str, kind: str) -> None:
    """Descriptors, threads and mappings are back at the baseline, whoever closes first."""

    async def scenario() -> None:
        async with pair(kind):
            await asyncio.sleep(0)  # a loop keeps some of what it needs for its first server
        for closes_first in ("writer", "peer"):
            before = _held()
            async with pair(kind) as (writer, peer):
                source, _ = writer.region(16 * MIB, 1)
                target, _ = peer.region(16 * MIB)
                await writer.write(source, target, (0, 0, 100))
                transfers = [writer.copy(source, target, intent) for intent in Intent]
                await asyncio.sleep(0.001)
                await (writer if closes_first == "writer" else peer).transport.close()
                outcomes = await asyncio.gather(*map(done, transfers), return_exceptions=True)
                assert all(outcome is None or isinstance(outcome, TransferError) for outcome in outcomes)
                if closes_first == "writer" or kind != "null":
                    with pytest.raises(TransferError):
                        await writer.copy(source, target)
            await asyncio.sleep(0.05)
            assert _held() == before

    run(loop, scenario())


def _held() -> tuple[int, int, int]:
    """Open descriptors, threads (without those of the loop's own pool) and mapped segments."""
    with open("/proc/self/maps") as maps:
        mappings = sum("dualpath-" in line for line in maps)
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return len(os.listdir("/proc/self/fd")), len(threads), mappings


@each_kind
def test_soak(kind: str) -> None:
    """200 transfers both ways at once, half of them cancelled at random moments: nothing leaks, counters add up."""

    async def one(chance: random.Random, writer: End, source: object, target: object) -> bool:
        size = chance.choice([1, 4096, 300_000, 2 * MIB])
        transfer = writer.write(source, target, (0, chance.randrange(2 * MIB), size))  # type: ignore[arg-type]
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.01)
            await transfer.cancel()
        try:
            await transfer
        except TransferError:
            return False
        return True

    async def scenario() -> None:
        chance = random.Random(4)
        async with pair(kind) as (left, right):
            ends = []
            for writer, peer in ((left, right), (right, left)):
                source, _ = writer.region(4 * MIB, noise(4 * MIB))
                target, _ = peer.region(4 * MIB)
                await writer.write(source, target, (0, 0, 1))
                ends.append((writer, source, target))
            descriptors = len(os.listdir("/proc/self/fd"))
            outcomes = await asyncio.gather(*(one(chance, *ends[i % 2]) for i in range(200)))
            assert len(os.listdir("/proc/self/fd")) == descriptors
            done = sum(e.counted("transport_transfers", intent="kv_load", transport=kind) for e in (left, right))
            assert done == outcomes.count(True) + 2
            failed = sum(e.counted("transport_failures", intent="kv_load", transport=kind) for e in (left, right))
            assert failed == outcomes.count(False)

    run("uvloop", scenario())


def test_transfers_in_flight_are_bounded_class_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue refuses at once, keeps no other class out, and shows in its gauges."""
    monkeypatch.setattr("common.transport.endpoint.MAX_TRANSFERS", 3)

    async def scenario() -> None:
        async with pair("tcp") as (writer, peer):
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            of_the_class = (Intent.KV_LOAD, Intent.PD_HANDOFF, Intent.KV_LOAD)
            transfers = [writer.copy(source, target, intent) for intent in of_the_class]
            with pytest.raises(TransferError, match="3 transfers of class kv are in flight"):
                writer.copy(source, target, Intent.PD_HANDOFF)
            urgent = writer.copy(source, target, Intent.MODEL_COLLECTIVE)
            assert queued(writer) == {"collective": (1, 100), "kv": (3, 300), "background": (0, 0)}
            await urgent
            for transfer in transfers:
                await transfer
            await asyncio.sleep(0)
            await writer.copy(source, target)
            await asyncio.sleep(0)
            assert queued(writer) == {"collective": (0, 0), "kv": (0, 0), "background": (0, 0)}

    run("uvloop", scenario())


def queued(end: End) -> dict[str, tuple[float, float]]:
    """Transfers and bytes in flight, by class."""
    values = end.metrics.snapshot()
    return {
        name: tuple(values[f"transport_queued_{unit}{{nic=,traffic_class={name}}}"] for unit in ("transfers", "bytes"))
        for name in ("collective", "kv", "background")
    }  # type: ignore[return-value]


@each_loop
def test_a_copy_stops_between_pieces(loop: str) -> None:
    """What cancel() rests on: the thread is told to stop and waited for; a stopped or late copy writes nothing more."""

    async def scenario() -> None:
        copier, begun, ended = Copier(), threading.Event(), threading.Event()

        def work(stop: Stop) -> None:
            begun.set()
            assert stop.wait(20)
            ended.set()

        running = asyncio.ensure_future(copier.run(work))
        queued = asyncio.ensure_future(copier.run(work))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        queued.cancel()
        await asyncio.wait({queued})
        assert queued.cancelled() and not ended.is_set()
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled() and ended.is_set()
        copier.close()

        async with end("shm") as one:
            source, from_memory = one.region(MIB, 1)
            target, memory = one.region(MIB)
            job = Job(from_memory, Batch(source, target, make_runs(0, 0, MIB)), Intent.KV_LOAD, time.monotonic() + 20)
            stopped = Stop()
            stopped.set()
            late = replace(job, deadline=time.monotonic() - 1)
            for refused, stop in ((job, stopped), (late, Stop())):
                with pytest.raises(TransferError):
                    copy(refused, memory, stop)
            assert not any(memory.view)

    run(loop, scenario())


@each_kind
def test_pinned_memory_is_registered_as_any_other(kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            memory = Memory.create("pinned", MIB)
            peer.memories.append(memory)
            await peer.transport.pin(memory)
            await peer.transport.pin(memory)
            source, _ = writer.region(MIB, noise(MIB))
            await writer.copy(source, peer.transport.register(memory))
            assert bytes(memory.view) == noise(MIB).tobytes()

    run("uvloop", scenario())


def test_a_memory_can_be_registered_with_two_transports() -> None:
    """Storage and compute interface share one buffer; ending one registration leaves the other."""

    async def scenario() -> None:
        async with end("shm") as storage, end("shm") as compute, end("shm") as writer:
            memory = Memory.create("buffer", 100)
            regions = [storage.transport.register(memory), compute.transport.register(memory)]
            source, _ = writer.region(50, 3)
            await writer.write(source, regions[0], (0, 0, 50))
            await writer.write(source, regions[1], (0, 50, 50))
            assert bytes(memory.view) == bytes([3]) * 100
            await storage.transport.deregister(regions[0])
            with pytest.raises(TransferError):
                await writer.copy(source, regions[0])
            await writer.copy(source, regions[1])
            await compute.transport.deregister(regions[1])
            memory.close()

    run("uvloop", scenario())
