"""Memory that two processes of one host can map, that vanishes with its owner, and that its owner can take back.

A region is an anonymous memory file (memfd) of fixed size. A peer of the same host and user opens it through its
owner's /proc/<pid>/fd, so there is no name to leak: when the last process that maps it is gone, also by kill -9, so is
the memory.

Behind the region's bytes the file holds a small table of grants: the keys under which peers may write at the moment. A
peer locks the table entry of its key for as long as it writes (an open-file-description lock, which the kernel drops if
the peer dies). So the owner can revoke a key and see when the last write under it has ended: what deregistration does
in RDMA hardware. Peers of one user are trusted to play along: this guards against late writers, not against attack.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import (
    F_ADD_SEALS,
    F_GET_SEALS,
    F_OFD_GETLK,
    F_OFD_SETLK,
    F_RDLCK,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    F_UNLCK,
    F_WRLCK,
    fcntl,
)
from functools import cache
from pathlib import Path

#: Bytes of a region key.
REGION_KEY_BYTES = 16
#: So many keys can be granted on one memory at a time: one for each registration.
MAX_GRANTS = 64

_NO_KEY = bytes(REGION_KEY_BYTES)
_TABLE = struct.Struct(f"{REGION_KEY_BYTES}s" * MAX_GRANTS)
_FIXED_SIZE = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
#: madvise(2): MADV_POPULATE_WRITE, which mmap has no name for.
_POPULATE_WRITE = 23
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


@cache
def host_identity() -> str:
    """Equal for two processes exactly when they can open one another's /proc/<pid>/fd."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def owner_pid(path: str) -> int:
    """The process through which a memory path leads. ValueError if it is no such path."""
    match = re.fullmatch(r"/proc/([0-9]{1,10})/fd/[0-9]{1,10}", path)
    if match is None:
        raise ValueError(f"{path!r} is not a memory path")
    return int(match[1])


class Memory:
    """A shared segment of size bytes; it belongs to whoever made it, who alone grants and revokes.

    view is writable and valid until close(). path leads other processes to it through this one. dmabuf: device memory
    that RDMA reads and writes in its place (common.transport.verbs.dmabuf), a descriptor that stays its giver's.
    """

    dmabuf: int | None = None

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._fd = fd
        self._table_start = os.fstat(fd).st_size - _TABLE.size
        self._map = mmap.mmap(fd, self._table_start + _TABLE.size)
        self.view = memoryview(self._map)[:size]

    @classmethod
    def create(cls, name: str, size: int) -> Memory:
        """New zeroed memory; pages are taken when first touched. name only shows up in /proc for people."""
        fd = os.memfd_create(f"dualpath-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size + _TABLE.size)
            fcntl(fd, F_ADD_SEALS, _FIXED_SIZE)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str, size: int) -> Memory:
        """A peer's memory. OSError if the owner is gone or not ours; ValueError if it is no memory of at least size."""
        owner_pid(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # a file that could shrink would kill whoever touches the lost part
            if fcntl(fd, F_GET_SEALS) != _FIXED_SIZE:
                raise ValueError(f"the file at {path} is not of fixed size")
            actual = os.fstat(fd).st_size - _TABLE.size
            if actual < size:
                raise ValueError(f"memory at {path} has {actual} bytes, not {size}")
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap. Idempotent. BufferError if somebody still holds a view of it."""
        if self._fd < 0:
            return
        self.view.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1

    def grant(self, key: bytes) -> int:
        """Let peers write under key from now on. The number of the grant; ValueError if all are taken."""
        grant = self._find(_NO_KEY)
        if grant is None:
            raise ValueError(f"all {MAX_GRANTS} grants of this memory are taken")
        self._write_grant(grant, key)
        return grant

    def revoke(self, grant: int) -> bool:
        """Let no further write begin under this grant. False while one that had begun goes on: ask again."""
        self._write_grant(grant, _NO_KEY)
        answer = fcntl(self._fd, F_OFD_GETLK, struct.pack(_FLOCK, F_WRLCK, os.SEEK_SET, grant, 1, 0))
        return bool(struct.unpack(_FLOCK, answer)[0] == F_UNLCK)

    @contextmanager
    def writing(self, key: bytes) -> Iterator[bool]:
        """Around a peer's write: whether key is granted. Not for two threads with one Memory at a time."""
        grant = self._find(key)
        if grant is None or key == _NO_KEY:
            yield False
            return
        self._lock(grant, F_RDLCK)
        try:
            # looked up again: whoever revokes clears the key first and then looks for locks
            yield self._find(key) == grant
        finally:
            self._lock(grant, F_UNLCK)

    def _find(self, key: bytes) -> int | None:
        """The table entry that holds key."""
        keys = _TABLE.unpack_from(self._map, self._table_start)
        return keys.index(key) if key in keys else None

    def _write_grant(self, grant: int, key: bytes) -> None:
        start = self._table_start + grant * REGION_KEY_BYTES
        self._map[start : start + REGION_KEY_BYTES] = key

    def _lock(self, grant: int, kind: int) -> None:
        fcntl(self._fd, F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, grant, 1, 0))


def populate(view: memoryview) -> None:
    """Have every page of mapped memory be there, as if it had been written to: in one go, without the interpreter's
    lock. Before Linux 5.14 nothing happens, and a page is made when it is first touched."""
    place = (ctypes.c_char * len(view)).from_buffer(view)
    ctypes.CDLL(None).madvise(ctypes.byref(place), ctypes.c_size_t(len(view)), ctypes.c_int(_POPULATE_WRITE))
