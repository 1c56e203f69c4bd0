"""Memory that two processes of one host can map, and that vanishes with its owner.

A region is an anonymous memory file (memfd). A peer of the same host and user opens it through the owner's
/proc/<pid>/fd, so there is no name to leak: when the last process that maps it is gone, also by kill -9, so is the memory.
"""

from __future__ import annotations

import mmap
import os
from functools import cache
from pathlib import Path


@cache
def host_identity() -> str:
    """Equal for two processes exactly when they can open one another's /proc/<pid>/fd."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


class Memory:
    """A shared segment, owned by whoever created it. view is writable and valid until close()."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self.size = size
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> Memory:
        """New zeroed memory; pages are taken when first touched. name only shows up in /proc for people."""
        fd = os.memfd_create(f"dualpath-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, size: int) -> Memory:
        """A peer's memory. OSError if the owner is gone or not ours; ValueError if it is smaller than size."""
        if not path.startswith("/proc/"):
            raise ValueError(f"{path!r} is not a memory path")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        actual = os.fstat(fd).st_size
        if actual < size:
            os.close(fd)
            raise ValueError(f"memory at {path} has {actual} bytes, not {size}")
        return cls(fd, size, path)

    def close(self) -> None:
        """Unmap. Idempotent. BufferError if somebody still holds a view of it."""
        if self._fd < 0:
            return
        self.view.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1
