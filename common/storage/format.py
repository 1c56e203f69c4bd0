"""The block file: a header that says what the payload is, then the Full Block as it lies in memory. Pure.

    offset 0     magic, version, namespace, key, num_layers, block_size, row_bytes, payload bytes, payload xxh3-64
    offset 4088  xxh3-64 of the 4088 bytes before it, padding included
    offset 4096  payload: bytes [num_layers, block_size, row_bytes]

All integers are little endian. The header fills a page, so that the payload is aligned for direct I/O and mapping.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields

import xxhash

from common.types import KEY_BYTES

MAGIC = b"DPBLOCK\0"
VERSION = 1
HEADER_BYTES = 4096
NAMESPACE_BYTES = 32

_FIELDS = struct.Struct(f"<8sI{NAMESPACE_BYTES}s{KEY_BYTES}sIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class BadBlock(ValueError):
    """These bytes are not the block that was asked for. reason is one word, for a counter's label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block file says about its payload. Sizes in bytes; checksum is the payload's xxh3-64."""

    namespace: bytes
    key: bytes
    num_layers: int
    block_size: int
    row_bytes: int
    payload_bytes: int
    checksum: int

    def expect(self, other: BlockHeader) -> None:
        """BadBlock, naming the first field that differs, unless both describe the same block."""
        for field in fields(self):
            have, want = getattr(self, field.name), getattr(other, field.name)
            if have != want and field.name != "checksum":
                raise BadBlock("foreign", f"{field.name} is {_shown(have)}, not {_shown(want)}")


def _shown(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def pack_header(header: BlockHeader) -> bytes:
    """The HEADER_BYTES that precede the payload."""
    packed = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.namespace,
        header.key,
        header.num_layers,
        header.block_size,
        header.row_bytes,
        header.payload_bytes,
        header.checksum,
    ).ljust(_CHECKED_BYTES, b"\0")
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def parse_header(raw: bytes | bytearray) -> BlockHeader:
    """The inverse of pack_header. BadBlock for anything else."""
    if len(raw) != HEADER_BYTES:
        raise BadBlock("short", f"a header of {len(raw)} bytes, not {HEADER_BYTES}")
    magic, version, *values = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise BadBlock("header", "not a block file")
    if _CHECKSUM.unpack_from(raw, _CHECKED_BYTES)[0] != xxhash.xxh3_64_intdigest(raw[:_CHECKED_BYTES]):
        raise BadBlock("header", "the header's checksum does not fit")
    if version != VERSION:
        raise BadBlock("version", f"format version {version}, not {VERSION}")
    return BlockHeader(*values)
