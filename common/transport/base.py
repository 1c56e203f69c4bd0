"""The contract of every transport: one-sided writes between registered regions (spec §5; shaped for RDMA verbs).

Life of a region: register(memory) -> RegionDescriptor, which travels in control messages and, like an RDMA rkey, is the
right to write there -> deregister, after which any write to it is refused and memory is no longer touched.

Life of a transfer: write(batch) -> Transfer, running -> done | failed | cancelled. Awaiting it returns when the bytes
are in place on the other side and visible there (so a message sent afterwards is a valid notice), or raises
TransferError, also if it was cancelled; a short or partial write is an error, never success. Nobody has to await it.
cancel() returns once both memories are quiet.

A batch is one submission. Its runs are (source offset, target offset, length) in bytes; runs of one batch must not
overlap on the target side. Every address is range-checked on the side that owns it.

Order: a transfer ends after the last of its bytes, never before, whatever carries it; inside it they land in any order.
Frames of one stream and lists of one queue pair are answered in the order in which they were sent, and an answer or
notice out of turn ends the connection. Between transfers no order is promised: what must come after another one is
written when that has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import DualPathError, ErrorCode
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor


class Intent(StrEnum):
    """What a transfer is for; it maps to a traffic class (spec §5)."""

    MODEL_COLLECTIVE = "model_collective"
    KV_LOAD = "kv_load"
    PD_HANDOFF = "pd_handoff"
    KV_PERSIST = "kv_persist"


class TransferError(DualPathError):
    """Bytes did not arrive, or not all of them."""

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.TRANSFER_FAILED, detail)


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs to write from one local region into one remote region: int64 [n, 3] of source, target, length (bytes)."""

    source: RegionDescriptor
    target: RegionDescriptor
    runs: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        return int(self.runs[:, 2].sum())


@dataclass(frozen=True, slots=True)
class FilePart:
    """length bytes of an open file from offset on; checksum: their xxh3-64. Whoever opened it closes it, after every
    transfer of it has ended."""

    fd: int
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileBatch:
    """Parts to write into one remote region, each whole, at its byte offset there. They must not overlap."""

    parts: tuple[FilePart, ...]
    target: RegionDescriptor
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.length for part in self.parts)


class Transfer(Protocol):
    """A batch in flight."""

    def __await__(self) -> Generator[Any, Any, object]: ...

    async def cancel(self) -> None:
        """Stop it. Returns once neither memory is touched any more; a transfer that is done stays done."""


class Transport(Protocol):
    """Moves batches. One event loop; all methods but the copying itself run on it."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Cancel what is in flight, deregister everything, free sockets and mappings."""

    async def pin(self, memory: Memory) -> None:
        """Have the NIC take hold of memory that is to be registered. register() does so too, but the event loop stands
        still meanwhile: for large memory a second and more. ConfigError as register()."""

    def register(self, memory: Memory) -> RegionDescriptor:
        """Make local memory readable by local writes and writable by peers that hold the descriptor."""

    def deregister(self, region: RegionDescriptor) -> Awaitable[None]:
        """Returns once nothing touches the region and later writes to it are refused."""

    def give_up(self, target: RegionDescriptor) -> None:
        """The target's owner is lost: what is on its way there fails now, not at its deadline, where that can be."""

    def write(self, batch: Batch, intent: Intent) -> Transfer:
        """Start one submission. TransferError at once for a run out of range or an unknown source."""

    def takes_files(self, target: RegionDescriptor) -> bool:
        """Whether write_files() has a way there: unpaced, and one that reads files itself."""

    def write_files(self, batch: FileBatch, intent: Intent) -> Transfer:
        """As write(), of parts of open files, each verified where it arrives. It fails if one of them is damaged."""


def make_runs(source: object, target: object, length: object) -> NDArray[np.int64]:
    """Runs from three sequences or scalars (broadcast together), neighbours that continue one another joined."""
    columns = np.broadcast_arrays(
        np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64), np.asarray(length, dtype=np.int64)
    )
    runs = np.stack([np.atleast_1d(column) for column in columns], axis=1)
    if len(runs) < 2:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:3]
    first = np.concatenate(([True], (ends != runs[1:, :2]).any(axis=1)))
    starts = np.flatnonzero(first)
    joined = runs[starts].copy()
    joined[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return joined


def split_runs(runs: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """The same runs in the same order, cut so that none is longer than limit bytes. Empty ones vanish."""
    pieces = -(-runs[:, 2] // limit)
    if (pieces == 1).all():
        return runs
    cut = np.repeat(runs, pieces, axis=0)
    skip = (np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    cut[:, :2] += skip[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - skip, limit)
    return cut


def cut_runs(runs: NDArray[np.int64], most_bytes: int, most_runs: int | None = None) -> Iterator[NDArray[np.int64]]:
    """The same runs in the same order, in parts of at most so many bytes and runs."""
    pieces = split_runs(runs, most_bytes)
    ends = np.cumsum(pieces[:, 2])
    first = 0
    while first < len(pieces):
        limit = ends[first] - pieces[first, 2] + most_bytes
        last = int(np.searchsorted(ends, limit, side="right"))
        if most_runs is not None:
            last = min(last, first + most_runs)
        yield pieces[first:last]
        first = last


def check_runs(runs: NDArray[np.int64], source_size: int, target_size: int) -> None:
    """TransferError unless every run lies inside both regions."""
    if runs.ndim != 2 or runs.shape[1] != 3 or runs.dtype != np.int64:
        raise TransferError(f"runs must be int64 [n, 3], not {runs.dtype} {list(runs.shape)}")
    for side, size, column in (("source", source_size, 0), ("target", target_size, 1)):
        if not inside(runs[:, column], runs[:, 2], size):
            raise TransferError(f"a run leaves the {side} region of {size} bytes")


def inside(offsets: NDArray[np.int64], lengths: NDArray[np.int64], size: int) -> bool:
    """Whether every [offset, offset + length) lies inside [0, size)."""
    if len(offsets) == 0:
        return True
    # compared without adding, so that no sum can overflow
    return bool(min(offsets.min(), lengths.min()) >= 0 and lengths.max() <= size and (offsets <= size - lengths).all())
