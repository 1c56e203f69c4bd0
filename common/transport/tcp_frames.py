"""The wire format of the tcp transport: framed one-sided writes and their acknowledgements. Little endian.

A frame is a header, a table of runs (offset and length in the target region, 8 bytes each), the runs' bytes one after
the other, and their checksum. Header and table have checksums of their own, which are verified before a byte of the
region is touched; that of the payload comes last, so that both sides compute it piece by piece, while the bytes are in
the processor's cache, and is verified before the write is acknowledged. A transfer is one frame or more, so that no
transfer keeps a stream for itself, and stopping one at the end of a frame leaves the stream whole. Frames are
acknowledged in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from common.transport.base import cut_runs
from common.transport.copying import MIN_RECORDS
from common.transport.memory import REGION_KEY_BYTES
from common.wire import PROTOCOL_VERSION

MAGIC = b"DPTW"
#: A frame carries at most so many bytes and runs; our own are shorter, so that several transfers share a stream.
MAX_PAYLOAD_BYTES = 64 << 20
FRAME_BYTES = 8 << 20
MAX_RUNS = 2048
RUN_BYTES = 16
#: So many frames of one stream, and about so many bytes, may be under way: more than the sockets hold, so that a sender
#: waits for room in them, not for answers. It bounds how long a stopped transfer takes to be quiet.
MAX_UNACKED = 64
MAX_UNACKED_BYTES = 32 << 20
#: One vectored call sends so much at most: between its checksum and its copy it stays in the processor's cache.
CHUNK_BYTES = 1 << 20
MAX_SLICES = 128
#: Where a frame has many runs, shorter than this on average, its bytes are gathered before they are sent, and scattered
#: when all of them have been received: cheaper than a place of its own for each in the vectored calls.
SHORT_RUN_BYTES = 4 << 10
SCRATCH_BYTES = 1 << 20
#: A stream that has more to send, or to take, gives the event loop back after so many bytes.
TURN_BYTES = 8 << 20

# magic, version, traffic class, region key, transfer, runs, payload bytes, table checksum
_HEADER = struct.Struct(f"<4sHBx{REGION_KEY_BYTES}sQIIQ")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + CHECKSUM.size
#: transfer, status
ACK = struct.Struct("<QB7x")


class Status(IntEnum):
    """What became of a frame."""

    OK = 0
    UNKNOWN_REGION = 1
    OUT_OF_RANGE = 2
    CHECKSUM = 3


class FrameError(Exception):
    """Bytes that are not a frame: nothing that follows on the stream can be trusted."""


class Header(NamedTuple):
    traffic_class: int
    key: bytes
    transfer: int
    num_runs: int
    num_bytes: int
    table_checksum: int

    def pack(self) -> bytes:
        raw = _HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            self.traffic_class,
            self.key,
            self.transfer,
            self.num_runs,
            self.num_bytes,
            self.table_checksum,
        )
        return raw + CHECKSUM.pack(xxh3_64_intdigest(raw))

    @classmethod
    def unpack(cls, raw: memoryview) -> Header:
        """FrameError unless it is a sound header of our version within the limits."""
        magic, version, *rest = _HEADER.unpack_from(raw)
        if magic != MAGIC or version != PROTOCOL_VERSION:
            raise FrameError(f"magic {magic!r}, version {version}")
        if CHECKSUM.unpack_from(raw, _HEADER.size)[0] != xxh3_64_intdigest(raw[: _HEADER.size]):
            raise FrameError("header checksum")
        header = cls(*rest)
        if not (0 < header.num_runs <= MAX_RUNS and 0 < header.num_bytes <= MAX_PAYLOAD_BYTES):
            raise FrameError(f"{header.num_runs} runs, {header.num_bytes} bytes")
        return header


def has_short_runs(num_runs: int, num_bytes: int) -> bool:
    """Whether the bytes of a frame travel through a Scratch."""
    return num_runs >= MIN_RECORDS and num_bytes <= SCRATCH_BYTES and num_bytes < num_runs * SHORT_RUN_BYTES


class Scratch:
    """Room for the payload of one frame, taken on first use."""

    def __init__(self) -> None:
        self._room: memoryview | None = None

    def first(self, num_bytes: int) -> memoryview:
        if self._room is None:
            self._room = memoryview(bytearray(SCRATCH_BYTES))
        return self._room[:num_bytes]


class Cursor:
    """How far a frame's runs have been sent out of a memory, or received into one."""

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        self._offsets = offsets
        self._lengths = lengths
        self._run = 0
        self._done = 0  # bytes of that run
        self.remaining = sum(lengths)

    def slices(self, memory: memoryview, most: int = MAX_SLICES, most_bytes: int = CHUNK_BYTES) -> list[memoryview]:
        """What comes next, as so many slices and bytes at most, for one vectored call. Drop them before waiting for
        anything in which the memory could be closed."""
        views: list[memoryview] = []
        run, done = self._run, self._done
        while most_bytes and run < len(self._lengths) and len(views) < most:
            start = self._offsets[run] + done
            length = min(self._lengths[run] - done, most_bytes)
            views.append(memory[start : start + length])
            most_bytes -= length
            run, done = run + 1, 0
        return views

    def advance(self, num_bytes: int) -> None:
        self.remaining -= num_bytes
        self._done += num_bytes
        while self._run < len(self._lengths) and self._done >= self._lengths[self._run]:
            self._done -= self._lengths[self._run]
            self._run += 1


def split_frames(runs: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Runs (source, target, length), frame by frame."""
    for frame in cut_runs(runs, FRAME_BYTES, MAX_RUNS):
        if len(frame) >= MIN_RECORDS and frame[:, 2].mean() < SHORT_RUN_BYTES:
            yield from cut_runs(frame, SCRATCH_BYTES)
        else:
            yield frame


def pack_table(runs: NDArray[np.int64]) -> bytes:
    """The table for runs (source, target, length)."""
    return runs[:, 1:].astype("<i8").tobytes()


def unpack_table(raw: memoryview, header: Header) -> Table:
    """The runs in the target region. FrameError if they are not what the header announces."""
    if xxh3_64_intdigest(raw) != header.table_checksum:
        raise FrameError("table checksum")
    numbers = struct.unpack(f"<{2 * header.num_runs}q", raw)
    table = Table(numbers[::2], numbers[1::2])
    if min(table.lengths) <= 0 or sum(table.lengths) != header.num_bytes:
        raise FrameError("the runs do not add up to the payload")
    return table


class Table(NamedTuple):
    """Runs in a region: offsets and lengths, bytes. Plain integers, which do not overflow."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def fits(self, size: int) -> bool:
        """Whether all runs lie inside a region of that size."""
        ends = map(add, self.offsets, self.lengths)
        return min(self.offsets) >= 0 and max(ends) <= size


def packed(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each run begins when they lie one after the other."""
    return np.cumsum(lengths) - lengths
