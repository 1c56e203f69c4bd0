"""Block store in a directory of any POSIX file system, mounts of distributed ones included.

    manifest.json      what the blocks belong to (common.model.Manifest), written once, on first use
    blocks/ab/abcd...  one file a block (common.storage.format), named by its key in hex, fanned out by the first byte
    tmp/               files being written; a finished one is renamed to its place, so readers see all of it or nothing
    quarantine/        files that were not what they should be, for a post-mortem

Several processes may share a directory. Nothing is synced to disk: after a power failure a block may be damaged, and a
damaged block is a miss like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from common.log import get_logger
from common.metrics import Metrics
from common.model import Manifest
from common.storage.claim import BLOCKS, DRAFTS, QUARANTINE, claim_directory, create_locked, make_directory
from common.storage.format import HEADER_BYTES, BadBlock, BlockHeader, pack_header, parse_header
from common.tasks import to_the_end
from common.transport.base import FilePart

T = TypeVar("T")

#: Errors that condemn the file itself; any other failure to read says nothing about it, and leaves it in place.
_DAMAGED = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EBADMSG, errno.EUCLEAN})
LOOKUP_THREADS = 2
#: Opening files that are cached is short; more threads would spend their time handing the interpreter's lock around.
OPENING_THREADS = 2
#: A file counts as cached if it is at its ends and so many bytes apart in between.
PROBE_BYTES = 1 << 20


class DirectoryStore:
    """The default BlockStore (common.storage.base). concurrency: blocks read or written at a time.

    verify False takes a payload as it comes, whatever its checksum says.
    """

    def __init__(
        self, root: Path, manifest: Manifest, metrics: Metrics, *, verify: bool = True, concurrency: int = 8
    ) -> None:
        geometry = manifest.geometry
        self._root = root
        self._manifest = manifest
        self._verify = verify
        self._header = BlockHeader(
            namespace=manifest.namespace,
            key=b"",
            num_layers=geometry.num_layers,
            block_size=geometry.block_size,
            row_bytes=geometry.row_bytes,
            payload_bytes=geometry.full_block_bytes,
            checksum=0,
        )
        self._file_bytes = HEADER_BYTES + geometry.full_block_bytes
        self._bulk = ThreadPoolExecutor(concurrency, "storage-bulk")
        # every request waits for its lookup: lookups must not queue behind bulk I/O
        self._lookup = ThreadPoolExecutor(LOOKUP_THREADS, "storage-lookup")
        self._opening = ThreadPoolExecutor(OPENING_THREADS, "storage-open")
        self._log = get_logger()
        self._read = metrics.counter("storage_blocks_read", "Blocks read and found good")
        self._read_bytes = metrics.counter("block_store_read_bytes", "Payload bytes of blocks read and found good")
        self._written = metrics.counter("storage_blocks_written", "Blocks stored")
        self._written_bytes = metrics.counter("block_store_written_bytes", "Payload bytes of blocks stored")
        self._misses = metrics.counter("storage_misses", "Reads that gave no block, for whatever reason")
        self._failed_puts = metrics.counter("storage_failed_puts", "Blocks that could not be stored", ("error",))
        self._quarantined = metrics.counter("storage_blocks_quarantined", "Damaged block files set aside", ("reason",))

    async def open(self) -> None:
        self._root = await self._in_bulk(claim_directory, self._root, self._manifest)

    async def close(self) -> None:
        for executor in (self._lookup, self._opening, self._bulk):
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        return await self._in(self._lookup, self._are_blocks, paths)

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        for block in into:
            self._check_size(block)
        # all of them in one go: a hop between threads costs more than a block
        found = await to_the_end(self._in_bulk(self._read_blocks, keys, into))
        self.count_read(sum(found))
        self._misses.inc(len(found) - sum(found))
        return found

    def count_read(self, count: int) -> None:
        self._read.inc(count)
        self._read_bytes.inc(count * self._header.payload_bytes)

    async def open_parts(self, keys: Sequence[bytes]) -> list[FilePart | None]:
        if not self._verify:
            return [None] * len(keys)
        opening = self._opening.submit(self._open_parts, keys)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_parts)  # it touches nothing of the caller's, who need not wait for it
            raise

    async def write(self, key: bytes, payload: memoryview, checksum: int) -> bool:
        self._check_size(payload)
        stored = await to_the_end(self._write_block(key, payload, checksum))
        if stored:
            self._written.inc()
            self._written_bytes.inc(payload.nbytes)
        return stored

    def _open_parts(self, keys: Sequence[bytes]) -> list[FilePart | None]:
        """Up to the first that is not cached: opening what is not may take long, and read() opens it again."""
        parts: list[FilePart | None] = []
        for key in keys:
            parts.append(self._open_part(key) if not parts or parts[-1] is not None else None)
        return parts

    def _read_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return [self._read_block(key, block) for key, block in zip(keys, into, strict=True)]

    def _read_block(self, key: bytes, into: memoryview) -> bool:
        try:
            self._load(key, into)
        except FileNotFoundError:
            return False
        except BadBlock as bad:
            self._quarantine(key, bad.reason, str(bad))
            return False
        except OSError as error:
            if error.errno in _DAMAGED:
                self._quarantine(key, _name(error), str(error))
            else:
                self._log.warning("block not read", key=key.hex(), error=str(error))
            return False
        return True

    def _load(self, key: bytes, into: memoryview) -> None:
        """BadBlock, OSError."""
        head = bytearray(HEADER_BYTES)
        fd = self._open_block(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            _fill(fd, head, into)
        finally:
            os.close(fd)
        header = self._checked(key, head)
        if self._verify and xxhash.xxh3_64_intdigest(into) != header.checksum:
            raise BadBlock("checksum", "the payload's checksum does not fit")

    def _open_part(self, key: bytes) -> FilePart | None:
        head = bytearray(HEADER_BYTES)
        try:
            fd = self._open_block(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (BadBlock, OSError):
            return None
        try:
            _read_cached(fd, head, 0)
            for offset in (*range(HEADER_BYTES, self._file_bytes, PROBE_BYTES), self._file_bytes - 1):
                _read_cached(fd, bytearray(1), offset)
            header = self._checked(key, head)
        except (BadBlock, OSError):
            os.close(fd)
            return None
        return FilePart(fd, HEADER_BYTES, header.payload_bytes, header.checksum)

    def _checked(self, key: bytes, head: bytearray) -> BlockHeader:
        """The block's own header. BadBlock if it is not this block's."""
        header = parse_header(head)
        header.expect(replace(self._header, key=key))
        return header

    async def _write_block(self, key: bytes, payload: memoryview, checksum: int) -> bool:
        draft = f"{self._root}/{DRAFTS}/{secrets.token_hex(16)}"
        header = pack_header(replace(self._header, key=key, checksum=checksum))
        try:
            await self._in_bulk(_write_draft, draft, header, payload)
            await self._in_bulk(_publish, draft, self._path(key))
        except OSError as error:
            self._failed_puts.labels(_name(error)).inc()
            self._log.warning("block not stored", key=key.hex(), error=str(error))
            with contextlib.suppress(OSError):
                await self._in_bulk(os.unlink, draft)
            return False
        return True

    def _quarantine(self, key: bytes, reason: str, detail: str) -> None:
        try:
            os.replace(self._path(key), f"{self._root}/{QUARANTINE}/{key.hex()}")
        except FileNotFoundError:
            return  # another reader was faster
        except OSError as error:
            self._log.error("damaged block cannot be set aside", key=key.hex(), reason=reason, error=str(error))
            return
        self._quarantined.labels(reason).inc()
        self._log.warning("damaged block set aside", key=key.hex(), reason=reason, detail=detail)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{BLOCKS}/{name[:2]}/{name}"

    def _check_size(self, block: memoryview) -> None:
        if block.nbytes != self._header.payload_bytes:
            raise ValueError(f"a block has {self._header.payload_bytes} bytes, not {block.nbytes}")

    def _are_blocks(self, paths: list[str]) -> list[bool]:
        return [self._is_block(path) for path in paths]

    def _is_block(self, path: str) -> bool:
        """A file of the right kind and size; whether its bytes are good shows when they are read."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes

    def _open_block(self, path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # non-blocking: a pipe must not hang us
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._file_bytes:
            os.close(fd)
            raise BadBlock("size", f"not a regular file of {self._file_bytes} bytes")
        return fd

    async def _in_bulk(self, function: Callable[..., T], *args: Any) -> T:
        return await self._in(self._bulk, function, *args)

    async def _in(self, executor: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


def _fill(fd: int, *places: bytearray | memoryview) -> None:
    """Read a file from its beginning, straight into its places. BadBlock if it ends before they are full."""
    rest, done = [memoryview(place) for place in places], 0
    while rest:
        got = os.preadv(fd, rest, done)
        if not got:
            raise BadBlock("short", f"the file ends after {done} bytes")
        done += got
        while rest and got >= len(rest[0]):
            got -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][got:]


def _close_parts(opening: Future[list[FilePart | None]]) -> None:
    """Nobody waits for them any more."""
    if not opening.cancelled():
        for part in opening.result():
            if part is not None:
                os.close(part.fd)


def _read_cached(fd: int, place: bytearray, offset: int) -> None:
    """Fill place out of the page cache. OSError if a disk would have to be waited for."""
    if os.preadv(fd, [place], offset, os.RWF_NOWAIT) < len(place):
        raise BlockingIOError


def _write_draft(draft: str, header: bytes, payload: memoryview) -> None:
    with open(draft, "xb", opener=create_locked) as file:
        file.write(header)
        file.write(payload)


def _publish(draft: str, path: str) -> None:
    try:
        os.replace(draft, path)
    except FileNotFoundError:  # the first block of its sub-directory
        make_directory(Path(path).parent)
        os.replace(draft, path)


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
