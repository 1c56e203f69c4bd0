"""The contract of every block-store back end: whole Full Blocks by key, verified, published atomically (spec §4).

Storage is an accelerator, not a dependency. Whatever goes wrong with a block is a miss (read) or a failed put (write),
never an exception; only open() refuses, with ConfigError, a store that can never work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.transport.base import FilePart


class BlockStore(Protocol):
    """Full Blocks of one manifest. One event loop; no method blocks it.

    Buffers that are passed in belong to the caller, who leaves them alone until the call is over. A cancelled call is
    over only once nothing touches its buffer any more.
    """

    async def open(self) -> None:
        """Get ready. ConfigError if the store cannot be used, or belongs to another model."""

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are stored, as one batched query, aligned with keys."""

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fill each of into (full_block_bytes) with the verified block; False is a miss, and its place then holds
        garbage."""

    async def open_parts(self, keys: Sequence[bytes]) -> list[FilePart | None]:
        """The payload of each block as part of an open file, for a transport that verifies it where it arrives; the
        caller closes the descriptors. None where read() has to be asked: for blocks that are not there, or no files, or
        not in the page cache, or not to be verified; and for all behind such a block. A cancelled call does not
        wait for the file system, and closes what comes of it."""

    def count_read(self, count: int) -> None:
        """So many blocks that were opened have been read and found good. read() counts by itself."""

    async def write(self, key: bytes, payload: memoryview, checksum: int) -> bool:
        """Store payload (full_block_bytes) with the source's xxh3-64; False if it failed. Visible at once and whole, or
        not at all; a block that is there already is replaced by its equal."""

    async def close(self) -> None:
        """Free threads and files. All other calls are over by then."""
