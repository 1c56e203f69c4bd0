"""Parts of open files as what is written: from the page cache to their place, with no copy in this process's memory.

A part has its checksum already (a stored block's), so it is not computed before it is sent, but where it arrives.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64

from common.transport.base import FileBatch, Intent, TransferError
from common.transport.memory import Memory

#: What is read at a time, and its checksum computed while it is in the processor's cache.
PIECE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class FileJob:
    """A checked FileBatch on its way. deadline: time.monotonic() seconds. corrupt: as in common.transport.mover.Job."""

    batch: FileBatch
    intent: Intent
    deadline: float
    corrupt: bool = False


def check_places(batch: FileBatch, target_size: int) -> None:
    """TransferError unless every part lies inside the target region, and no part is empty."""
    if len(batch.parts) != len(batch.offsets):
        raise TransferError(f"{len(batch.parts)} parts, but {len(batch.offsets)} offsets")
    for part, offset in zip(batch.parts, batch.offsets, strict=True):
        if not (part.length > 0 and 0 <= offset <= target_size - part.length):
            raise TransferError(f"a part leaves the target region of {target_size} bytes")


def read_parts(job: FileJob, target: Memory, go_on: Callable[[], bool]) -> None:
    """Read every part into its place and verify it there. TransferError if one is short, damaged or out of range, or
    once go_on says no: no byte is written after that."""
    check_places(job.batch, target.size)
    for part, place in zip(job.batch.parts, job.batch.offsets, strict=True):
        done, digest = 0, xxh3_64()
        while done < part.length:
            if not go_on():
                raise TransferError("stopped or over its deadline in mid-read")
            start, length = place + done, min(PIECE_BYTES, part.length - done)
            with target.view[start : start + length] as view:
                try:
                    got = os.preadv(part.fd, [view], part.offset + done)
                except OSError as error:
                    raise TransferError(f"the file cannot be read: {error.strerror}") from None
                with view[:got] as read:
                    digest.update(read)
            if not got:
                raise TransferError(f"the file ends {part.length - done} bytes early")
            done += got
        if digest.intdigest() ^ job.corrupt != part.checksum:
            raise TransferError("what was read does not have its checksum")
