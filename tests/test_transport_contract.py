"""The contract of common.transport.base, kept by every transport on both event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transport.base import Batch, Intent, TransferError, make_runs, split_runs
from common.transport.copier import Copier, Stop, copy
from common.transport.memory import Memory
from common.transport.mover import Job
from common.transport.region import RegionDescriptor
from tests.rdma_support import VERBS
from tests.transport_support import LOOPS, MIB, End, end, noise, pair, run

MOVING = ["shm", "tcp", VERBS]
each_loop = pytest.mark.parametrize("loop", LOOPS)
each_kind = pytest.mark.parametrize("kind", MOVING)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """A size of both regions and batches of runs (source, target, length) that do not overlap on the target side."""
    lengths = draw(
        st.lists(
            st.one_of(st.integers(1, 64), st.integers(1, 70_000), st.integers(MIB - 1, 3 * MIB)),
            min_size=1,
            max_size=24,
        )
    )
    gaps = draw(st.lists(st.integers(0, 4096), min_size=len(lengths), max_size=len(lengths)))
    targets, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        targets.append(at + gap)
        at += gap + length
    size = at + draw(st.integers(0, 100))
    runs = [
        (draw(st.integers(0, size - length)), target, length) for target, length in zip(targets, lengths, strict=True)
    ]
    shuffled = draw(st.permutations(runs))
    num_batches = draw(st.integers(1, len(runs)))
    return size, [list(shuffled[i::num_batches]) for i in range(num_batches)]


@each_loop
@each_kind
@settings(max_examples=20, deadline=None)
@given(layout=layouts(), cancelled=st.sets(st.integers(0, 23), max_size=6), ticks=st.integers(0, 30))
def test_what_arrives_is_what_was_sent(
    loop: str, kind: str, layout: tuple[int, list[list[tuple[int, int, int]]]], cancelled: set[int], ticks: int
) -> None:
    """Batches in flight together, some cancelled in mid-way: whole where done, old or new where not, else untouched."""
    size, batches = layout

    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            sent = noise(size)
            source, _ = writer.region(size, sent)
            target, memory = peer.region(size, noise(size, 1))
            expected = noise(size, 1)
            transfers = [writer.write(source, target, *batch) for batch in batches]
            for _ in range(ticks):
                await asyncio.sleep(0)
            doubtful = np.zeros(size, bool)
            for index, (transfer, batch) in enumerate(zip(transfers, batches, strict=True)):
                try:
                    if index in cancelled:
                        await transfer.cancel()
                    await transfer
                    places = expected
                except TransferError:
                    assert index in cancelled
                    places = None
                for start, to, length in batch:
                    if places is None:
                        doubtful[to : to + length] = True
                    else:
                        places[to : to + length] = sent[start : start + length]
            received = np.frombuffer(bytes(memory.view), np.uint8)
            assert np.array_equal(received[~doubtful], expected[~doubtful])
            for index in cancelled & set(range(len(batches))):
                for start, to, length in batches[index]:
                    got, old, new = received[to:][:length], expected[to:][:length], sent[start:][:length]
                    assert ((got == old) | (got == new)).all()

    run(loop, scenario())


@each_kind
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 2 * MIB)), min_size=1, max_size=8),
    cancelled=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=4),
)
def test_what_a_notice_announces_is_there_and_stays(
    kind: str, sizes: list[int], cancelled: set[tuple[int, int]]
) -> None:
    """Slots side by side, in both directions and all classes, each written again as soon as it may be: with the notice
    the bytes are there, and nothing that was sent or cancelled before comes after it."""
    starts = np.cumsum([0, *sizes])

    async def rewrite(writer: End, peer: End, index: int) -> None:
        source, own = writer.region(sizes[index])
        target, memory = peer.region(int(starts[-1]), 255)
        start, size = int(starts[index]), sizes[index]
        for turn in range(3):
            own.view[:] = bytes([turn + 1]) * size
            intent = list(Intent)[(index + turn) % len(Intent)]
            transfer = writer.transport.write(Batch(source, target, make_runs(0, start, size)), intent)
            if (index, turn) in cancelled:
                await asyncio.sleep(0)
                await transfer.cancel()
                own.view[:] = bytes([9]) * size  # the memory is ours again: nobody reads this
                assert not set(memory.view[start : start + size : 997]) & {9}
            else:
                await transfer
                assert bytes(memory.view[start : start + size]) == bytes([turn + 1]) * size
            assert bytes(memory.view[:start]).count(255) == start
            assert bytes(memory.view[start + size :]).count(255) == starts[-1] - start - size

    async def scenario() -> None:
        async with pair(kind) as (left, right), asyncio.TaskGroup() as group:
            for index in range(len(sizes)):
                ends = (left, right) if index % 2 else (right, left)
                group.create_task(rewrite(*ends, index))

    run("uvloop", scenario())


@each_loop
@each_kind
def test_64_mib_in_one_batch(loop: str, kind: str) -> None:
    """The event loop goes on meanwhile, and small transfers are not kept waiting for the end."""

    async def scenario() -> None:
        size = 64 * MIB
        async with pair(kind) as (writer, peer):
            data = noise(size)
            source, _ = writer.region(size, data)
            target, memory = peer.region(size)
            blocks = np.random.default_rng(2).permutation(size // 98304)
            runs = make_runs(blocks * 98304, np.arange(len(blocks)) * 98304, 98304)
            transfer = asyncio.ensure_future(_wait(writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)))
            ticks = 0
            while not transfer.done():
                await asyncio.sleep(0.0005)
                ticks += 1
            await transfer
            assert ticks > 2
            whole = len(blocks) * 98304
            got = np.frombuffer(bytes(memory.view), np.uint8)
            assert np.array_equal(got[:whole].reshape(-1, 98304), data[:whole].reshape(-1, 98304)[blocks])
            assert not got[whole:].any()
            assert writer.counted("transport_bytes", intent="kv_load", transport=kind) == whole

    run(loop, scenario())


async def _wait(transfer: object) -> None:
    await transfer  # type: ignore[misc]


@each_kind
def test_many_small_runs(kind: str) -> None:
    async def scenario() -> None:
        count, row = 20_000, 48
        async with pair(kind) as (writer, peer):
            data = noise(count * row)
            source, _ = writer.region(count * row, data)
            target, memory = peer.region(count * row)
            order = np.random.default_rng(3).permutation(count)
            runs = make_runs(order * row, np.arange(count) * row, row)
            await writer.transport.write(Batch(source, target, runs), Intent.PD_HANDOFF)
            assert bytes(memory.view) == data.reshape(-1, row)[order].tobytes()

    run("uvloop", scenario())


@each_loop
@pytest.mark.parametrize("kind", [*MOVING, "auto", "null"])
def test_local_writes_and_empty_batches(loop: str, kind: str) -> None:
    """A local target is written directly, small or large; nothing is posted for nothing (case A07)."""

    async def scenario() -> None:
        async with end(kind) as one:
            source, _ = one.region(MIB, noise(MIB))
            target, memory = one.region(MIB)
            await one.write(source, target)
            await one.write(source, target, (5, 9, 0))
            values = one.metrics.snapshot().items()
            assert not any(value for name, value in values if name.startswith("transport_"))
            await one.write(source, target, (100, 7, 1000))
            label = "null" if kind == "null" else "local"
            assert one.counted("transport_bytes", intent="kv_load", transport=label) == 1000
            moved = bytes(1000) if kind == "null" else noise(MIB)[100:1100].tobytes()
            assert bytes(memory.view) == bytes(7) + moved + bytes(MIB - 1007)
            await one.copy(source, target)
            assert one.counted("transport_transfers", intent="kv_load", transport=label) == 2
            assert bytes(memory.view) == (bytes(MIB) if kind == "null" else noise(MIB).tobytes())

    run(loop, scenario())


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*MOVING, "null"])
@pytest.mark.parametrize(
    "bad_run",
    [(0, 0, 101), (1, 0, 100), (0, 151, 50), (-1, 0, 5), (0, -1, 5), (5, 5, -1), (2**63 - 1, 0, 2), (0, 2**63 - 1, 2)],
)
def test_a_run_out_of_range_is_refused_at_once(kind: str, bad_run: tuple[int, int, int]) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(100, 7)
            target, memory = peer.region(200)
            with pytest.raises(TransferError):
                writer.write(source, target, (0, 0, 1), bad_run)
            assert not any(memory.view)

    run("asyncio", scenario())


@each_kind
def test_unknown_regions_are_refused(kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(100, 7)
            target, memory = peer.region(100)
            with pytest.raises(TransferError):
                writer.copy(target, source)
            with pytest.raises(TransferError):
                writer.copy(source, replace(target, shm="", address="", verbs=""))
            with pytest.raises(TransferError):
                await writer.copy(source, replace(target, key=bytes(16)))
            with pytest.raises(TransferError):  # a size that the owner never gave
                await writer.write(source, replace(target, size=500), (0, 450, 50))
            with pytest.raises(TransferError):
                await writer.copy(source, _elsewhere(target, "/proc/999999999/fd/3", "127.0.0.1:1"))
            with pytest.raises(TransferError):
                await writer.copy(source, _elsewhere(target, "/etc/passwd", "example:nonsense"))
            await writer.copy(source, target)
            assert bytes(memory.view) == bytes([7]) * 100
            # a descriptor that overstates a region which is mapped already
            with pytest.raises(TransferError):
                await writer.write(source, replace(target, size=1 << 40), (0, 1 << 30, 50))

    run("uvloop", scenario())


def _elsewhere(target: RegionDescriptor, path: str, address: str) -> RegionDescriptor:
    """The descriptor with these ways in, whatever the transport."""
    return replace(target, shm=path, address=address, verbs=f"{address}/0")


@each_loop
@each_kind
def test_failures_that_nobody_awaits_are_quiet(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(100, 7)
            target, _ = peer.region(100)
            transfers = [writer.copy(source, replace(target, key=os.urandom(16))) for _ in range(3)]
            await asyncio.sleep(0.2)
            assert writer.counted("transport_failures", intent="kv_load", transport=kind) == 3
            del transfers
            gc.collect()

    run(loop, scenario())


# ---- life ------------------------------------------------------------------------------------------------------------


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
def test_a_caller_that_stops_waiting_does_not_stop_the_transfer(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(8 * MIB, 1)
            target, memory = peer.region(8 * MIB)
            transfer = writer.copy(source, target)
            waiter = asyncio.ensure_future(_wait(transfer))
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
                outcomes = await asyncio.gather(*map(_wait, transfers), return_exceptions=True)
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


# ---- run arithmetic --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=20),
    limit=st.integers(1, 12),
)
def test_joining_and_splitting_runs_keeps_every_byte(runs: list[tuple[int, int, int]], limit: int) -> None:
    def bytes_of(table: np.ndarray) -> list[tuple[int, int]]:
        return [(source + i, target + i) for source, target, length in table.tolist() for i in range(length)]

    table = np.array(runs, dtype=np.int64)
    joined = make_runs(*table.T)
    cut = split_runs(joined, limit)
    assert bytes_of(joined) == bytes_of(cut) == bytes_of(table)
    assert len(cut) == 0 or (cut[:, 2].min() > 0 and cut[:, 2].max() <= limit)


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
