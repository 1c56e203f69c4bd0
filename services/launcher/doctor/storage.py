"""The block directory: can it be written, what is it on, how much room it has, how fast it reads."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from services.launcher.doctor.check import Check, Level, judged, show_bytes

SAMPLE_BYTES = 64 << 20
CHUNK_BYTES = 2 << 20
#: For writing the sample and for reading it.
SAMPLE_S = 10.0
LEAST_FREE_BYTES, LEAST_FREE_INODES = 10 << 30, 10_000
#: Below, KV of a small model is computed as fast as it is read.
SLOW_BYTES_PER_S = 100e6
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Place:
    """file_system: its type; mode: permission bits; free_inodes: None where it has no fixed number of them."""

    path: str
    file_system: str
    mode: int
    own: bool
    free_bytes: int
    free_inodes: int | None


def nearest(path: Path) -> Path:
    """The path, or the directory above it in which it would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def read_place(path: Path) -> Place:
    """OSError."""
    status, space = path.stat(), os.statvfs(path)
    return Place(
        path=str(path),
        file_system=file_system_of(path.resolve(), Path("/proc/self/mountinfo").read_text()),
        mode=stat.S_IMODE(status.st_mode),
        own=status.st_uid == os.geteuid(),
        free_bytes=space.f_bavail * space.f_frsize,
        free_inodes=space.f_favail if space.f_files else None,
    )


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the deepest mount that the path is in, as /proc/self/mountinfo has them."""
    found, depth = "unknown", -1
    for line in mountinfo.splitlines():
        own, _, rest = line.partition(" - ")
        point = Path(own.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) > depth:  # of two on one point the later is on top
            found, depth = rest.split()[0], len(point.parts)
        elif path.is_relative_to(point) and len(point.parts) == depth:
            found = rest.split()[0]
    return found


def judge_place(place: Place) -> Iterator[Check]:
    inodes = "" if place.free_inodes is None else f", {place.free_inodes:,} files"
    yield judged(
        "storage room",
        f"{place.path} on {place.file_system}: {show_bytes(place.free_bytes)} free{inodes}",
        (place.free_bytes < SAMPLE_BYTES, Level.FAIL, "make room, or set storage.path elsewhere"),
        (
            place.free_bytes < LEAST_FREE_BYTES or (place.free_inodes or LEAST_FREE_INODES) < LEAST_FREE_INODES,
            Level.WARN,
            "make room: blocks are never evicted, and what cannot be stored is computed again",
        ),
        (place.file_system in IN_MEMORY, Level.WARN, "its blocks are memory, gone with this host: set storage.path"),
    )
    yield judged(
        "storage access",
        f"{place.path}: mode {place.mode:04o}, {'ours' if place.own else 'of another user'}",
        (bool(place.mode & stat.S_IWOTH), Level.WARN, f"chmod o-w {place.path}: anybody could plant KV"),
    )


def read_speed(directory: Path) -> float:
    """Bytes/s of a file that has just been written and left the page cache, where the file system lets go of it.
    OSError if it cannot be written."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as file:
        fd, chunk = file.fileno(), os.urandom(CHUNK_BYTES)
        until, written = time.monotonic() + SAMPLE_S, 0
        while written < SAMPLE_BYTES and time.monotonic() < until:
            written += os.write(fd, chunk)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begun, offset, buffer = time.perf_counter(), 0, bytearray(CHUNK_BYTES)
        while offset < written and time.perf_counter() - begun < SAMPLE_S:
            offset += os.preadv(fd, [buffer], offset)
        return offset / (time.perf_counter() - begun)


def judge_speed(bytes_per_s: float) -> Check:
    return judged(
        "storage speed",
        f"reads {bytes_per_s / 1e6:,.0f} MB/s in one stream",
        (bytes_per_s < SLOW_BYTES_PER_S, Level.WARN, "a small model computes KV as fast: set storage.path elsewhere"),
    )


def check_storage(config: Config) -> Iterator[Check]:
    if not config.storage.path:
        yield Check("storage", Level.OK, "storage.path is not set: `dualpath up` keeps blocks for as long as it runs")
        return
    path = Path(config.storage.path)
    there = nearest(path)
    if not there.is_dir():
        yield Check("storage", Level.FAIL, f"{there} is not a directory", "set storage.path to one")
        return
    try:
        yield from judge_place(read_place(there))
        yield judge_speed(read_speed(there))
    except OSError as error:
        yield Check("storage", Level.FAIL, f"{there}: {error.strerror}", "let this user read and write storage.path")
