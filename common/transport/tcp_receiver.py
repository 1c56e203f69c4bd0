"""The receiving side of the tcp transport: a listener that writes sound frames straight into registered regions.

Each stream is a generator that takes frames as long as there are bytes and yields where there are none, with how many
it would like: so the kernel wakes the event loop for a piece worth its while, not for every packet.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Generator
from ipaddress import ip_address
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from common.errors import ConfigError
from common.metrics import Metrics
from common.transport.classes import TRAFFIC_CLASSES, mark
from common.transport.copying import copy_runs
from common.transport.mover import Region, Regions
from common.transport.sockets import check_not_reset, do_not_pace_loopback
from common.transport.tcp_frames import (
    ACK,
    CHECKSUM,
    HEADER_BYTES,
    MAX_RUNS,
    MAX_UNACKED,
    RUN_BYTES,
    TURN_BYTES,
    Cursor,
    FrameError,
    Header,
    Scratch,
    Status,
    Table,
    has_short_runs,
    packed,
    unpack_table,
)

#: Peers times traffic classes, with room to spare; further ones are turned away.
MAX_CONNECTIONS = 1024
DISCARD_BYTES = 64 << 10
#: Pause after a failed accept (out of descriptors), seconds.
ACCEPT_RETRY_S = 0.05
#: In mid-frame a stream waits for so many bytes, or for the rest of the frame. One call takes no more than these, which
#: the checksum then finds in the core's own cache, together with what they were copied from: there it is twice as fast.
WAKE_BYTES = 2 << 20
TAKE_BYTES = 512 << 10
#: What a frame and each of its runs take beside their bytes, as the bytes that one could have taken meanwhile.
FRAME_COST, RUN_COST = 64 << 10, 1 << 10
#: Late streams are looked for so many times within their time.
SWEEPS = 4

Result = TypeVar("Result")
Steps = Generator[int, None, Result]
"""Work on a stream; it yields the bytes that it waits for (1: any) whenever it has to wait, or has had its turn."""


class Stream:
    """One peer's stream, from its first byte to its end, which ended() tells once.

    since: when it began to owe us bytes (time.monotonic); None between frames.
    """

    def __init__(
        self, sock: socket.socket, regions: Regions, refuse: Callable[[str], None], ended: Callable[[Stream], None]
    ) -> None:
        self.since: float | None = time.monotonic()  # a peer that connects has something to send
        self._sock = sock
        self._regions = regions
        self._refuse = refuse
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._head = memoryview(bytearray(HEADER_BYTES + MAX_RUNS * RUN_BYTES))  # and the table behind it
        self._checksum = memoryview(bytearray(CHECKSUM.size))
        self._scratch = Scratch()
        self._class: int | None = None
        self._acks = bytearray()
        self._turn = 0  # bytes taken in this one
        self._wanted = 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # or a host that vanishes leaves it for ever
        self._steps = self._take_frames()
        self._loop.add_reader(sock, self._on_readable)

    def end(self, reason: str = "") -> None:
        """Take nothing more. Idempotent. reason: why it is refused, "" if it is not."""
        if self._sock.fileno() < 0:
            return
        if reason:
            self._refuse(reason)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._ended(self)

    def _on_readable(self) -> None:
        self._turn = 0
        try:
            wanted = next(self._steps)
            check_not_reset(self._sock)
            self._acknowledge()
            if wanted != self._wanted:
                self._wanted = wanted
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        except StopIteration:
            self.end()
        except FrameError:
            self.end("malformed")
        except OSError:
            self.end("broken_off")

    def _acknowledge(self) -> None:
        """Answer for frames taken. Of a peer that keeps to the protocol so few are under way that they have room."""
        if self._acks:
            try:
                sent = self._sock.send(self._acks)
            except BlockingIOError:
                sent = 0
            if sent < len(self._acks):
                raise ConnectionResetError("a peer that does not read")
            self._acks.clear()

    def _take_frames(self) -> Steps[None]:
        """Until the peer is done, or does something that cannot be forgiven."""
        while (yield from self._head_filled()):
            header = Header.unpack(self._head[:HEADER_BYTES])
            if header.traffic_class >= len(TRAFFIC_CLASSES):
                raise FrameError(f"traffic class {header.traffic_class}")
            if header.traffic_class != self._class:
                self._class = header.traffic_class
                mark(self._sock, TRAFFIC_CLASSES[self._class])  # acknowledgements ride with their data
            status = yield from self._take_frame(header)
            if status is not Status.OK:
                self._refuse(status.name.lower())
            self.since = None
            self._acks += ACK.pack(header.transfer, status)
            self._turn += FRAME_COST + header.num_runs * RUN_COST
            if self._turn >= TURN_BYTES:
                yield 1
            elif len(self._acks) >= MAX_UNACKED // 2 * ACK.size:
                self._acknowledge()
        self._acknowledge()

    def _head_filled(self) -> Steps[bool]:
        """A header and the first run, which every frame has. Returns False if the stream ends where a frame could
        begin."""
        filled, wanted = 0, HEADER_BYTES + RUN_BYTES
        while filled < wanted:
            try:
                received = self._sock.recv_into(self._head[filled:wanted])
            except BlockingIOError:
                yield wanted - filled if filled else 1
                continue
            if not received:
                if filled:
                    raise ConnectionResetError
                return False
            if self.since is None:
                self.since = time.monotonic()
            filled += received
        return True

    def _take_frame(self, header: Header) -> Steps[Status]:
        """The payload into its region if all is well, else into nothing; returns what became of it."""
        raw_table = self._head[HEADER_BYTES:][: header.num_runs * RUN_BYTES]
        yield from self._fill(raw_table[RUN_BYTES:])
        table = unpack_table(raw_table, header)
        region = self._regions.get(header.key)
        if region is None:
            yield from self._discard(header.num_bytes + CHECKSUM.size)
            return Status.UNKNOWN_REGION
        if not table.fits(region.descriptor.size):
            yield from self._discard(header.num_bytes + CHECKSUM.size)
            return Status.OUT_OF_RANGE
        if has_short_runs(header.num_runs, header.num_bytes):
            return (yield from self._take_scattered(header, table, region))
        return (yield from self._take_in_place(table, region))

    def _take_in_place(self, table: Table, region: Region) -> Steps[Status]:
        cursor, digest, ahead = Cursor(*table), xxh3_64(), 0
        while cursor.remaining:
            if not region.registered:
                yield from self._discard(cursor.remaining + CHECKSUM.size)
                return Status.UNKNOWN_REGION
            before = cursor.remaining
            try:
                ahead = _receive_some(self._sock, region, cursor, digest, self._checksum)
                self._turn += before - cursor.remaining
            except BlockingIOError:
                self._turn = TURN_BYTES
            if self._turn >= TURN_BYTES and cursor.remaining:
                yield min(cursor.remaining + CHECKSUM.size, WAKE_BYTES)
        return (yield from self._verified(digest.intdigest(), ahead))

    def _take_scattered(self, header: Header, table: Table, region: Region) -> Steps[Status]:
        payload = self._scratch.first(header.num_bytes)
        yield from self._fill(payload)
        status = yield from self._verified(xxh3_64_intdigest(payload))
        if status is not Status.OK or not region.registered:
            return Status.UNKNOWN_REGION if status is Status.OK else status
        check_not_reset(self._sock)
        offsets, lengths = np.array(table, dtype=np.int64)
        copy_runs(payload, region.memory.view, np.stack([packed(lengths), offsets, lengths], axis=1))
        return Status.OK

    def _verified(self, digest: int, ahead: int = 0) -> Steps[Status]:
        """Whether the sender has the same checksum, which comes next; so many bytes of it are here."""
        yield from self._fill(self._checksum[ahead:])
        return Status.OK if CHECKSUM.unpack(self._checksum)[0] == digest else Status.CHECKSUM

    def _fill(self, place: memoryview) -> Steps[None]:
        """Fill memory of our own."""
        while place:
            try:
                received = self._sock.recv_into(place)
            except BlockingIOError:
                yield min(len(place), WAKE_BYTES)
                continue
            if not received:
                raise ConnectionResetError
            self._turn += received
            place = place[received:]

    def _discard(self, num_bytes: int) -> Steps[None]:
        nowhere = memoryview(bytearray(min(num_bytes, DISCARD_BYTES)))
        while num_bytes:
            part = nowhere[: min(num_bytes, DISCARD_BYTES)]
            yield from self._fill(part)
            num_bytes -= len(part)
            if num_bytes and self._turn >= TURN_BYTES:
                yield min(num_bytes, WAKE_BYTES)


class Listener:
    """Accepts peers on one address. A peer gets timeout_s for each frame, from its first byte to its last."""

    def __init__(self, host: str, regions: Regions, metrics: Metrics, timeout_s: float) -> None:
        self.address = ""
        self._host = host
        self._regions = regions
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._streams: set[Stream] = set()
        self._sweep: asyncio.TimerHandle | None = None
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
        do_not_pace_loopback(listener, host)
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
        for stream in list(self._streams):
            stream.end()

    def _accept(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, say: try again when some may be free
            self._refuse("accept")
            asyncio.get_running_loop().remove_reader(self._sock)
            asyncio.get_running_loop().call_later(ACCEPT_RETRY_S, self._accept_again)
            return
        if len(self._streams) >= MAX_CONNECTIONS:
            self._refuse("too_many")
            sock.close()
            return
        try:
            self._streams.add(Stream(sock, self._regions, self._refuse, self._ended))
        except OSError:  # it is gone already
            sock.close()
            return
        if self._sweep is None:
            self._sweep_later()

    def _accept_again(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _refuse(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def _ended(self, stream: Stream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._timeout_s / SWEEPS, self._end_late)

    def _end_late(self) -> None:
        self._sweep_later()
        begun_by = time.monotonic() - self._timeout_s
        for stream in [one for one in self._streams if one.since is not None and one.since < begun_by]:
            stream.end("late")


def _receive_some(sock: socket.socket, region: Region, cursor: Cursor, digest: xxh3_64, checksum: memoryview) -> int:
    """One vectored call, and the digest while the bytes are in the processor's cache. The bytes of the checksum that
    came with the last of the payload. Nothing of a peer that has reset the connection is written any more: its transfer
    has failed there, and the memory may soon belong to another."""
    check_not_reset(sock)
    views = cursor.slices(region.memory.view, most_bytes=TAKE_BYTES)
    rest = received = sock.recvmsg_into([*views, checksum] if sum(map(len, views)) == cursor.remaining else views)[0]
    if not received:
        raise ConnectionResetError
    for view in views:
        taken = min(rest, len(view))
        digest.update(view[:taken])
        rest -= taken
        if not rest:
            break
    cursor.advance(received - rest)
    return rest
