"""Parts of files written one-sided: the contract of write_files(), kept by every transport that takes files."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from common.faults import Fault
from common.transport.base import FileBatch, FilePart, Intent, TransferError
from common.transport.nic import Nic
from common.transport.region import RegionDescriptor
from tests.transport_support import LOOPS, MIB, End, end, noise, pair, run

each_loop = pytest.mark.parametrize("loop", LOOPS)
each_kind = pytest.mark.parametrize("kind", ["shm", "tcp", "local"])


@contextmanager
def stored(payload: bytes) -> Iterator[int]:
    """A descriptor of a file that holds these bytes."""
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        yield file.fileno()


def part(fd: int, payload: bytes, offset: int, length: int) -> FilePart:
    return FilePart(fd, offset, length, xxh3_64_intdigest(payload[offset : offset + length]))


def ends(kind: str, writer: End, peer: End) -> End:
    """Who has the target region."""
    return writer if kind == "local" else peer


def of(kind: str) -> str:
    return "shm" if kind == "local" else kind


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Parts (file offset, target offset, length) that do not overlap in the target, in any order."""
    lengths = draw(st.lists(st.one_of(st.integers(1, 100), st.integers(1, 70_000), st.integers(MIB - 1, 2 * MIB)),
                            min_size=1, max_size=12))  # fmt: skip
    gaps = draw(st.lists(st.integers(0, 4096), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([gap + length for gap, length in zip(gaps, lengths, strict=True)])
    offsets = [draw(st.integers(0, 3 * MIB - length)) for length in lengths]
    parts = [
        (offset, int(end_) - length, length) for offset, end_, length in zip(offsets, starts, lengths, strict=True)
    ]
    return draw(st.permutations(parts))


@each_kind
@settings(max_examples=15, deadline=None)
@given(layout=layouts(), damaged=st.booleans(), cancelled=st.integers(0, 20) | st.none())
def test_parts_arrive_whole_and_nothing_beside_them_changes(
    kind: str, layout: list[tuple[int, int, int]], damaged: bool, cancelled: int | None
) -> None:
    """Two batches side by side: one that may be cancelled or contain a damaged part, and one that is neither."""
    payload = noise(3 * MIB).tobytes()
    size = max(to + length for _, to, length in layout)

    async def scenario() -> None:
        async with pair(of(kind)) as (writer, peer):
            owner = ends(kind, writer, peer)
            target, memory = owner.region(size, noise(size, 1))
            other, other_memory = owner.region(size)
            parts = [part(fd, payload, offset, length) for offset, _, length in layout]
            good = FileBatch(tuple(parts), other, tuple(to for _, to, _ in layout))
            if damaged:
                parts[-1] = replace(parts[-1], checksum=parts[-1].checksum ^ 1)
            doomed = writer.transport.write_files(replace(good, parts=tuple(parts), target=target), Intent.KV_LOAD)
            bystander = writer.transport.write_files(good, Intent.KV_LOAD)
            if cancelled is not None:
                for _ in range(cancelled):
                    await asyncio.sleep(0)
                await doomed.cancel()
            try:
                await doomed
                whole = True
            except TransferError:
                assert damaged or cancelled is not None
                whole = False
            assert not (whole and damaged)
            await bystander
            expected, untouched = noise(size, 1), np.ones(size, bool)
            for offset, to, length in layout:
                sent = np.frombuffer(payload, np.uint8)[offset : offset + length]
                got = np.frombuffer(bytes(memory.view[to : to + length]), np.uint8)
                assert (got == sent).all() if whole else ((got == sent) | (got == expected[to : to + length])).all()
                assert other_memory.view[to : to + length] == payload[offset : offset + length]
                untouched[to : to + length] = False
            assert np.array_equal(np.frombuffer(bytes(memory.view), np.uint8)[untouched], expected[untouched])
            assert not np.frombuffer(bytes(other_memory.view), np.uint8)[untouched].any()

    with stored(payload) as fd:
        run("uvloop", scenario())


@each_loop
@each_kind
def test_a_file_that_has_become_shorter_fails_its_transfer_and_no_other(loop: str, kind: str) -> None:
    payload = noise(MIB).tobytes()

    async def scenario() -> None:
        async with pair(of(kind)) as (writer, peer):
            owner = ends(kind, writer, peer)
            target, _ = owner.region(MIB)
            source, _ = writer.region(MIB, 3)
            other, memory = owner.region(MIB)
            with stored(payload) as fd:
                os.truncate(fd, MIB - 1000)
                batch = FileBatch((part(fd, payload, 0, MIB),), target, (0,))
                short = writer.transport.write_files(batch, Intent.KV_LOAD)
                beside = writer.copy(source, other)
                with pytest.raises(TransferError):
                    await short
                await beside
                assert memory.view[MIB - 1] == 3
                await writer.transport.write_files(
                    replace(batch, parts=(part(fd, payload, 0, MIB - 1000),)), Intent.KV_LOAD
                )

    run(loop, scenario())


@each_kind
def test_what_may_not_be_written_is_refused_and_memory_stays_as_it_is(kind: str) -> None:
    payload = bytes(range(100))

    async def scenario() -> None:
        async with pair(of(kind)) as (writer, peer):
            target, memory = ends(kind, writer, peer).region(150, 7)
            write = writer.transport.write_files
            whole = part(fd, payload, 0, 100)
            for offset in (51, 150, -1, 2**63, 2**64):
                with pytest.raises(TransferError, match="leaves the target region"):
                    write(FileBatch((whole, whole), target, (0, offset)), Intent.KV_LOAD)
            with pytest.raises(TransferError, match="leaves the target region"):
                write(FileBatch((replace(whole, length=0),), target, (0,)), Intent.KV_LOAD)
            with pytest.raises(TransferError, match="1 parts, but 2 offsets"):
                write(FileBatch((whole,), target, (0, 10)), Intent.KV_LOAD)
            if kind != "local":
                with pytest.raises(TransferError):  # a key that grants nothing
                    await write(FileBatch((whole,), replace(target, key=bytes(16)), (0,)), Intent.KV_LOAD)
                with pytest.raises(TransferError):  # a size that the owner never gave
                    await write(FileBatch((whole,), replace(target, size=1 << 20), (149,)), Intent.KV_LOAD)
            assert bytes(memory.view) == bytes([7]) * 150
            await write(FileBatch((whole,), target, (50,)), Intent.KV_LOAD)
            assert bytes(memory.view) == bytes([7]) * 50 + payload
            label = "local" if kind == "local" else kind
            assert writer.counted("transport_bytes", intent="kv_load", transport=label) == 100

    with stored(payload) as fd:
        run("uvloop", scenario())


@each_kind
def test_faults_and_withdrawn_regions(kind: str) -> None:
    payload = noise(300_000).tobytes()
    faults = tuple(Fault(point="transfer", action=action, type="kv_load", times=1) for action in ("corrupt", "fail"))

    async def scenario() -> None:
        async with end(of(kind), faults=faults) as writer, end(of(kind)) as peer:
            owner = ends(kind, writer, peer)
            target, memory = owner.region(len(payload))
            batch = FileBatch((part(fd, payload, 0, len(payload)),), target, (0,))
            for _ in faults:
                with pytest.raises(TransferError):
                    await writer.transport.write_files(batch, Intent.KV_LOAD)
            await writer.transport.write_files(batch, Intent.KV_LOAD)
            assert bytes(memory.view) == payload
            await owner.transport.deregister(target)
            memory.view[:] = bytes(len(payload))
            with pytest.raises(TransferError):
                await writer.transport.write_files(batch, Intent.KV_LOAD)
            assert not any(memory.view)

    with stored(payload) as fd:
        run("uvloop", scenario())


def test_only_unpaced_ways_that_read_files_take_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with end("shm") as writer, end("shm", nic=Nic("slow", 1e6)) as slow, end("null") as nothing:
            target, _ = writer.region(100)
            assert writer.transport.takes_files(target)
            paced, _ = slow.region(100)
            assert not writer.transport.takes_files(paced)
            assert not nothing.transport.takes_files(target)
            with pytest.raises(TransferError, match="no way for files"):
                nothing.transport.write_files(FileBatch((FilePart(0, 0, 1, 0),), target, (0,)), Intent.KV_LOAD)
            with pytest.raises(TransferError):
                writer.transport.takes_files(RegionDescriptor(bytes(16), 1, "elsewhere", "", ""))

    run("uvloop", scenario())
