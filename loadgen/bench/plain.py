"""The plainest copy between two processes: blocking sockets, one message a piece, received into the same kind of
region, with the same checksum. What the tcp transport is held against."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import xxhash

from common.transport.memory import Memory
from common.transport.sockets import do_not_pace_loopback
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

#: Target offset, length, checksum. A length of 0 asks whether all has arrived.
_HEAD = struct.Struct("<QQQ")
_ACK = b"k"


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    memory = Memory.create("plain", layout.region_bytes)
    memory.view[:] = bytes(memory.size)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    threading.Thread(target=_receive, args=(listener, memory.view), daemon=True).start()
    yield Side(address=f"{host}:{port}", memory=memory.view)


def _receive(listener: socket.socket, region: memoryview) -> None:
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = memoryview(bytearray(_HEAD.size))
    while receive_exactly(peer, head):
        offset, length, checksum = _HEAD.unpack(head)
        if not length:
            peer.sendall(_ACK)
            continue
        piece = region[offset : offset + length]
        receive_exactly(peer, piece)
        if xxhash.xxh3_64_intdigest(piece) != checksum:
            return  # the sender notices that there is no answer


def receive_exactly(sock: socket.socket, place: memoryview) -> bool:
    """Fill place. False if the stream ends."""
    while place:
        received = sock.recv_into(place, 0, socket.MSG_WAITALL)
        if not received:
            return False
        place = place[received:]
    return True


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    memory = Memory.create("plain", layout.region_bytes)
    memory.view[:] = layout.content().data
    host, port = address.split(":")
    sock = socket.socket()
    do_not_pace_loopback(sock, host)
    sock.connect((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    runs = layout.runs().tolist()

    def send() -> None:
        for source, target, length in runs:
            piece = memory.view[source : source + length]
            _send(sock, [_HEAD.pack(target, length, xxhash.xxh3_64_intdigest(piece)), piece])
        sock.sendall(_HEAD.pack(0, 0, 0))
        if sock.recv(1) != _ACK:
            raise ConnectionError("the receiver has not got every piece as it was sent")

    yield Side(move=lambda: asyncio.to_thread(send))


def _send(sock: socket.socket, parts: list[bytes | memoryview]) -> None:
    sent = sock.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            sock.sendall(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
