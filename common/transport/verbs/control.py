"""How a connection is set up, and what its ends tell one another beside the bytes: messages on a stream of its own.

The stream lives exactly as long as the queue pairs at its two ends, so a peer that dies is noticed at once. Its address
travels in region descriptors, over the control plane, with the incarnation of the transport that it leads to: another
one that has got the same address since is not mistaken for it. Known limit, as with tcp: the stream itself is neither
encrypted nor authenticated; the right to write is a region's secret key, for which its owner gives out where the region
lies and the NIC's key to it.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

from common.wire import WireError, decode, encode, message

#: Nothing that is said takes more; a longer frame ends the connection.
MAX_MESSAGE_BYTES = 4096
_LENGTH = struct.Struct("<I")


@message
@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """One end of a connection. psn: of its first packet; mtu: path MTU in bytes; ethernet: RoCE, not InfiniBand."""

    number: int
    psn: int
    gid: str
    lid: int
    mtu: int
    ethernet: bool


@message
@dataclass(frozen=True, slots=True)
class Hello:
    """Writer to owner, first. incarnation: whom it wants; traffic_class: index in TRAFFIC_CLASSES."""

    version: int
    incarnation: str
    traffic_class: int
    pair: QueuePairAddress


@message
@dataclass(frozen=True, slots=True)
class Welcome:
    """Owner to writer: the queue pair is connected, and ready for so many notices."""

    pair: QueuePairAddress
    credits: int


@message
@dataclass(frozen=True, slots=True)
class Refused:
    """Owner to writer: there will be no connection, and this is why."""

    reason: str


@message
@dataclass(frozen=True, slots=True)
class Ask:
    """Writer to owner: where is the region with this key?"""

    key: bytes


@message
@dataclass(frozen=True, slots=True)
class Granted:
    """Owner to writer: size bytes at that address of the NIC's. Valid until Withdraw."""

    key: bytes
    address: int
    rkey: int
    size: int


@message
@dataclass(frozen=True, slots=True)
class Denied:
    """Owner to writer: no region has this key."""

    key: bytes


@message
@dataclass(frozen=True, slots=True)
class Withdraw:
    """Owner to writer: write there no more, and say so when that is so."""

    key: bytes


@message
@dataclass(frozen=True, slots=True)
class Quiet:
    """Writer to owner: nothing of ours is on its way to that region any more."""

    key: bytes


class EndOfStream(ConnectionError):
    """The peer has left between two messages."""


class ControlStream:
    """Messages both ways. One reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, own: str) -> ControlStream:
        """From our own address, so that it takes the way that the queue pair will: connecting that blocks for a second
        where the peer's link address is not known yet. OSError."""
        return cls(*await asyncio.open_connection(host, port, limit=MAX_MESSAGE_BYTES, local_addr=(own, 0)))

    def send(self, msg: object) -> None:
        """Never waits: what is said is little, and has a deadline elsewhere."""
        raw = encode(msg)
        self._writer.write(_LENGTH.pack(len(raw)) + raw)

    async def receive(self) -> Any:
        """The next message. OSError if there is none: EndOfStream, or ConnectionError for what is no message."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"sent a message of {length} bytes")
            return decode(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise EndOfStream("closed the connection") from None
        except WireError as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """What was sent still goes out. Idempotent."""
        self._writer.close()
