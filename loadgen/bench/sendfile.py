"""What the gateway is held against: block files by sendfile in one stream, received into the same kind of region, with
the same checksum. The active side asks for all blocks and receives them."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import xxhash

from common.storage.format import HEADER_BYTES, parse_header
from common.transport.memory import Memory
from common.transport.sockets import do_not_pace_loopback
from loadgen.bench.pieces import Layout
from loadgen.bench.plain import receive_exactly
from loadgen.bench.side import Side
from loadgen.bench.stored import path, places

_CHECKSUM = struct.Struct("<Q")


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    do_not_pace_loopback(listener, host)
    threading.Thread(target=_serve, args=(listener, Path(given), layout), daemon=True).start()
    yield Side(address=f"{host}:{port}")


def _serve(listener: socket.socket, root: Path, layout: Layout) -> None:
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while peer.recv(1):
        for block in range(layout.count):
            fd = os.open(path(root, block), os.O_RDONLY)
            checksum = parse_header(os.pread(fd, HEADER_BYTES, 0)).checksum
            peer.send(_CHECKSUM.pack(checksum), socket.MSG_MORE)
            sent = 0
            while sent < layout.size:
                sent += os.sendfile(peer.fileno(), fd, HEADER_BYTES + sent, layout.size - sent)
            os.close(fd)


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    memory = Memory.create("sendfile", layout.region_bytes)
    memory.view[:] = bytes(memory.size)
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)))
    offsets = places(layout)
    head = memoryview(bytearray(_CHECKSUM.size))

    def fetch() -> None:
        sock.send(b"g")
        for offset in offsets:
            place = memory.view[offset : offset + layout.size]
            receive_exactly(sock, head)
            receive_exactly(sock, place)
            if xxhash.xxh3_64_intdigest(place) != _CHECKSUM.unpack(head)[0]:
                raise ValueError("a block did not arrive as it was sent")

    yield Side(move=lambda: asyncio.to_thread(fetch), memory=memory.view)
