"""What the tcp transport sends: the frames of a transfer, out of registered memory or straight out of files."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from common.transport.base import FilePart
from common.transport.copying import copy_runs
from common.transport.files import FileJob
from common.transport.mover import Job
from common.transport.tcp_frames import (
    CHECKSUM,
    Cursor,
    Header,
    Scratch,
    has_short_runs,
    pack_table,
    packed,
    split_frames,
)

#: One sendfile() moves so much at most.
SENDFILE_BYTES = 4 << 20

_ZEROS = memoryview(bytes(64 << 10))


class Frame(Protocol):
    """A frame on its way into the socket."""

    num_bytes: int

    @property
    def whole(self) -> bool:
        """All of it is in the socket."""

    def send(self, sock: socket.socket) -> int:
        """One call. The bytes that the socket took; OSError."""


class Flow:
    """One transfer on a stream. done: None once every byte is in place, else what went wrong; the target is quiet then,
    and so is the source."""

    def __init__(self, number: int, job: Job | FileJob) -> None:
        self.number = number
        self.job = job
        self.unacked = 0  # frames begun
        self.spoil = job.corrupt  # the checksum of the next frame
        self.failure: str | None = None
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    @property
    def more(self) -> bool:
        """There are frames to begin."""
        return bool(self._frames())

    def begin(self, traffic_class: int, scratch: Scratch) -> Frame:
        """The next frame. scratch is its own until it is in the socket."""
        raise NotImplementedError

    def stop(self, failure: str) -> None:
        """Begin no further frame."""
        self.failure = self.failure or failure
        self._frames().clear()
        self.settle()

    def settle(self) -> None:
        if not self.more and not self.unacked and not self.done.done():
            self.done.set_result(self.failure)

    def header(self, traffic_class: int, num_runs: int, num_bytes: int, table: bytes) -> memoryview:
        """What a frame begins with, its table included."""
        key = self.job.batch.target.key
        header = Header(traffic_class, key, self.number, num_runs, num_bytes, xxh3_64_intdigest(table))
        return memoryview(header.pack() + table)

    def seal(self, digest: int) -> memoryview:
        """What a frame ends with."""
        spoiled, self.spoil = self.spoil, False
        return memoryview(CHECKSUM.pack(digest ^ spoiled))

    def _frames(self) -> deque[Any]:
        raise NotImplementedError


class MemoryFlow(Flow):
    """Out of registered memory."""

    def __init__(self, number: int, job: Job) -> None:
        super().__init__(number, job)
        self._source = job.source
        self._runs = deque(split_frames(job.batch.runs))

    def begin(self, traffic_class: int, scratch: Scratch) -> Frame:
        runs = self._runs.popleft()
        sources, _, lengths = runs.T.tolist()
        num_bytes = sum(lengths)
        head = self.header(traffic_class, len(runs), num_bytes, pack_table(runs))
        if not has_short_runs(len(runs), num_bytes):
            return MemoryFrame(self, head, self._source.view, Cursor(sources, lengths))
        gathered = scratch.first(num_bytes)
        copy_runs(self._source.view, gathered, np.stack([runs[:, 0], packed(runs[:, 2]), runs[:, 2]], axis=1))
        return MemoryFrame(self, head, gathered, Cursor([0], [num_bytes]))

    def _frames(self) -> deque[NDArray[np.int64]]:
        return self._runs


class MemoryFrame:
    """Runs of a memory, vectored; the checksum of each chunk is computed just before it goes."""

    def __init__(self, flow: Flow, head: memoryview, memory: memoryview, body: Cursor) -> None:
        self.num_bytes = body.remaining
        self._flow = flow
        self._memory = memory
        self._body = body
        self._next = [head]  # what the socket takes next
        self._digest = xxh3_64()

    @property
    def whole(self) -> bool:
        return not self._next and not self._body.remaining

    def send(self, sock: socket.socket) -> int:
        if self._body.remaining and len(self._next) < 2:
            self._add_chunk()
        rest = sent = sock.sendmsg(self._next)
        while self._next and rest >= len(self._next[0]):
            rest -= len(self._next.pop(0))
        if rest:
            self._next[0] = self._next[0][rest:]
        return sent

    def _add_chunk(self) -> None:
        views = self._body.slices(self._memory)
        for view in views:
            self._digest.update(view)
        self._body.advance(sum(map(len, views)))
        self._next += views
        if not self._body.remaining:
            self._next.append(self._flow.seal(self._digest.intdigest()))


class FileFlow(Flow):
    """Out of files: a frame a part."""

    def __init__(self, number: int, job: FileJob) -> None:
        super().__init__(number, job)
        self._parts = deque(zip(job.batch.parts, job.batch.offsets, strict=True))

    def begin(self, traffic_class: int, scratch: Scratch) -> Frame:
        part, offset = self._parts.popleft()
        table = pack_table(np.array([[0, offset, part.length]]))
        return FileFrame(self, self.header(traffic_class, 1, part.length, table), part)

    def _frames(self) -> deque[tuple[FilePart, int]]:
        return self._parts


class FileFrame:
    """A part of a file: the kernel sends it from the page cache. A file that has become shorter is filled up with
    zeros: then its checksum does not fit, and the stream stays whole."""

    def __init__(self, flow: Flow, head: memoryview, part: FilePart) -> None:
        self.num_bytes = part.length
        self._flow = flow
        self._part = part
        self._head = head
        self._sent = 0
        self._short = False
        self._seal: memoryview | None = None

    @property
    def whole(self) -> bool:
        return self._seal is not None and not self._seal

    def send(self, sock: socket.socket) -> int:
        rest = self._part.length - self._sent
        if self._head:
            sent = sock.send(self._head, socket.MSG_MORE)
            self._head = self._head[sent:]
        elif rest and self._short:
            sent = sock.send(_ZEROS[:rest])
            self._sent += sent
        elif rest:
            sent = os.sendfile(sock.fileno(), self._part.fd, self._part.offset + self._sent, min(rest, SENDFILE_BYTES))
            self._sent += sent
            self._short = not sent
        else:
            self._seal = self._seal if self._seal is not None else self._flow.seal(self._part.checksum)
            sent = sock.send(self._seal)
            self._seal = self._seal[sent:]
        return sent
