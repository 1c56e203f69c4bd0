"""Storage: scheduler and traffic managers -> storage gateway."""

from __future__ import annotations

from dataclasses import dataclass

from common.transport.region import RegionDescriptor
from common.wire import message


@message
@dataclass(frozen=True, slots=True)
class Match:
    """scheduler -> gateway, call: length of the longest stored prefix of keys, in blocks. Waits for a block in flight,
    but answers within timeouts.lookup_s. Answered by Matched."""

    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Matched:
    blocks: int


@message
@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """traffic manager -> gateway, call: write each Full Block to its offset (bytes) in the target region.

    Waits for blocks in flight, but is answered within timeouts.read_s by BlockResults: True where the block is in
    place. Blocks after a miss may be left out. Once the answer is there, nothing writes to the target for this call any
    more. incarnation: the caller's own, by which its leaving is known ("": it is no member).
    """

    request_id: str
    keys: bytes
    target: RegionDescriptor
    offsets: list[int]
    incarnation: str = ""


@message
@dataclass(frozen=True, slots=True)
class Announce:
    """traffic manager -> gateway, call: these blocks are about to be stored. incarnation: the caller's own, by which
    its leaving is known. Answered by Announced within timeouts.call_s.

    Lookups wait for a wanted block until its Commit, but no longer than timeouts.store_s from here or its Reserve.
    """

    incarnation: str
    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Announced:
    """wanted[i]: the i-th block is neither stored nor on its way from another writer: send it."""

    wanted: list[bool]


@message
@dataclass(frozen=True, slots=True)
class Reserve:
    """traffic manager -> gateway, call: places in the gateway's buffer for announced blocks, in order of arrival.

    Answered by Reserved within timeouts.store_s. Each place is given back by Commit, ok or not, and by nothing else as
    long as the caller lives.
    """

    incarnation: str
    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Reserved:
    """offsets (bytes) in target of the first len(offsets) blocks of the call: all of them, or as many as the gateway's
    buffer can ever hold at a time; then Commit these and reserve again for the rest."""

    target: RegionDescriptor
    offsets: list[int]


@message
@dataclass(frozen=True, slots=True)
class Commit:
    """traffic manager -> gateway, call: the reserved blocks have been written; publish them. checksums[i] is the
    source's xxh3-64; what arrived otherwise is refused. An announced block that will not come, or whose place the
    caller will not write to any more, has ok False. Answered by BlockResults within timeouts.store_s."""

    incarnation: str
    keys: bytes
    ok: list[bool]
    checksums: list[int]


@message
@dataclass(frozen=True, slots=True)
class BlockResults:
    """Per block, aligned with the call's keys: True is done, False is a miss or a failed store."""

    ok: list[bool]
