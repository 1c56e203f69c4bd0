"""The contract of common.transport.base, kept by every transport on both event loops: bytes, order and refusals."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transport.base import Batch, Intent, TransferError, make_runs
from common.transport.region import RegionDescriptor
from tests.transport_support import MIB, MOVING, End, done, each_kind, each_loop, end, noise, pair, run

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
            transfer = asyncio.ensure_future(done(writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)))
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
