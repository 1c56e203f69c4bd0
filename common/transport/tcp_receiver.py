"""The receiving side of the tcp transport: a listener that writes sound frames straight into registered regions."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from common.errors import ConfigError
from common.metrics import Metrics
from common.transport.classes import TRAFFIC_CLASSES, mark
from common.transport.copying import copy_runs
from common.transport.mover import Region, Regions
from common.transport.tcp_frames import (
    ACK,
    HEADER_BYTES,
    MAX_RUNS,
    RUN_BYTES,
    Cursor,
    FrameError,
    Header,
    Scratch,
    Status,
    checksum,
    fits,
    has_short_runs,
    packed,
    unpack_table,
)

#: Peers times traffic classes, with room to spare; further ones are turned away.
MAX_CONNECTIONS = 1024
SCRATCH_BYTES = 64 << 10
#: Pause after a failed accept (out of descriptors), seconds.
ACCEPT_RETRY_S = 0.05


class Listener:
    """Accepts peers on one address. A peer gets timeout_s for each frame, from its first byte to its last."""

    def __init__(self, host: str, regions: Regions, metrics: Metrics, timeout_s: float) -> None:
        self.address = ""
        self._host = host
        self._regions = regions
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))  # where refused payloads end; never read
        self._refused = metrics.counter("transport_refused", "Frames and connections refused, by reason", ("reason",))

    async def start(self) -> None:
        """Bind a free port of the host. ConfigError unless it is one address of ours, which peers can be told."""
        loop = asyncio.get_running_loop()
        try:
            family, *_, sockaddr = (await loop.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM))[0]
            listener = socket.create_server(sockaddr[:2], family=family, backlog=128)
        except OSError as error:
            raise ConfigError(f"cannot listen for transfers on {self._host!r}: {error}") from None
        listener.setblocking(False)
        host, port = listener.getsockname()[:2]
        if ip_address(host).is_unspecified:
            listener.close()
            raise ConfigError(f"cannot listen for transfers on {self._host!r}: give the interface's own address")
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._sock = listener
        loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _accept(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, say: try again when some may be free
            self._refused.labels("accept").inc()
            asyncio.get_running_loop().remove_reader(self._sock)
            asyncio.get_running_loop().call_later(ACCEPT_RETRY_S, self._accept_again)
            return
        if len(self._serving) >= MAX_CONNECTIONS:
            self._refused.labels("too_many").inc()
            sock.close()
            return
        task = asyncio.create_task(self._serve(sock), name=f"serve {self.address}")
        self._serving.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            sock.close()

        task.add_done_callback(ended)

    def _accept_again(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        """Take frames until the peer is done, or does something that cannot be forgiven."""
        head = memoryview(bytearray(HEADER_BYTES))
        table = memoryview(bytearray(MAX_RUNS * RUN_BYTES))
        scratch = Scratch()
        marked: int | None = None
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # or a host that vanishes leaves it for ever
            async with asyncio.timeout(self._timeout_s):
                more = await _more(sock)  # a peer that connects has something to send
            while more:
                async with asyncio.timeout(self._timeout_s):
                    header = await self._receive_header(sock, head)
                    if header.traffic_class != marked:
                        marked = header.traffic_class
                        mark(sock, TRAFFIC_CLASSES[marked])  # acknowledgements ride with their data
                    status = await self._receive_frame(sock, header, table[: header.num_runs * RUN_BYTES], scratch)
                    if status is not Status.OK:
                        self._refused.labels(status.name.lower()).inc()
                    await asyncio.get_running_loop().sock_sendall(sock, ACK.pack(header.transfer, status))
                await asyncio.sleep(0)  # a fast peer must not keep the event loop for itself
                more = await _more(sock)
        except FrameError:
            self._refused.labels("malformed").inc()
        except TimeoutError:
            self._refused.labels("late").inc()
        except OSError:
            self._refused.labels("broken_off").inc()

    async def _receive_header(self, sock: socket.socket, head: memoryview) -> Header:
        await _receive(sock, head)
        header = Header.unpack(head)
        if header.traffic_class >= len(TRAFFIC_CLASSES):
            raise FrameError(f"traffic class {header.traffic_class}")
        return header

    async def _receive_frame(
        self, sock: socket.socket, header: Header, raw_table: memoryview, scratch: Scratch
    ) -> Status:
        """The payload into its region if all is well, else into nothing."""
        await _receive(sock, raw_table)
        table = unpack_table(raw_table, header)
        region = self._regions.get(header.key)
        if region is None:
            await self._discard(sock, header.num_bytes)
            return Status.UNKNOWN_REGION
        if not fits(table, region.descriptor.size):
            await self._discard(sock, header.num_bytes)
            return Status.OUT_OF_RANGE
        if has_short_runs(header.num_runs, header.num_bytes):
            return await self._receive_scattered(sock, header, table, region, scratch)
        return await self._receive_in_place(sock, header, table, region)

    async def _receive_in_place(
        self, sock: socket.socket, header: Header, table: NDArray[np.int64], region: Region
    ) -> Status:
        offsets, lengths = table[:, 0].tolist(), table[:, 1].tolist()
        cursor = Cursor(offsets, lengths)
        while cursor.remaining:
            if not region.registered:
                await self._discard(sock, cursor.remaining)
                return Status.UNKNOWN_REGION
            try:
                _receive_some(sock, region, cursor)
            except BlockingIOError:
                await _readable(sock)
        if checksum(region.memory.view, offsets, lengths) != header.payload_checksum:
            return Status.CHECKSUM
        return Status.OK

    async def _receive_scattered(
        self, sock: socket.socket, header: Header, table: NDArray[np.int64], region: Region, scratch: Scratch
    ) -> Status:
        payload = scratch.first(header.num_bytes)
        await _receive(sock, payload)
        if not region.registered:
            return Status.UNKNOWN_REGION
        if xxh3_64_intdigest(payload) != header.payload_checksum:
            return Status.CHECKSUM
        _check_not_reset(sock)
        copy_runs(payload, region.memory.view, np.stack([packed(table[:, 1]), table[:, 0], table[:, 1]], axis=1))
        return Status.OK

    async def _discard(self, sock: socket.socket, num_bytes: int) -> None:
        while num_bytes:
            part = self._scratch[: min(num_bytes, SCRATCH_BYTES)]
            await _receive(sock, part)
            num_bytes -= len(part)


def _receive_some(sock: socket.socket, region: Region, cursor: Cursor) -> None:
    """One vectored call."""
    _check_not_reset(sock)
    received = sock.recvmsg_into(cursor.slices(region.memory.view))[0]
    if not received:
        raise ConnectionResetError
    cursor.advance(received)


def _check_not_reset(sock: socket.socket) -> None:
    """Nothing of a peer that has reset the connection is written any more: its transfer has failed there, and the
    memory may soon belong to another."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise ConnectionResetError


async def _receive(sock: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. ConnectionError if the stream ends before."""
    while buffer:
        try:
            received = sock.recv_into(buffer)
        except BlockingIOError:
            await _readable(sock)
            continue
        if not received:
            raise ConnectionResetError
        buffer = buffer[received:]


async def _more(sock: socket.socket) -> bool:
    """Wait for the next byte. False if the stream ends instead."""
    while True:
        try:
            return bool(sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            await _readable(sock)


async def _readable(sock: socket.socket) -> None:
    """Wait until there is something to read, or the end of the stream."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
