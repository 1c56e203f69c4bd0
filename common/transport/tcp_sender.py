"""The sending side of the tcp transport: streams of frames, driven by readiness of their sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable

from common.transport.classes import TRAFFIC_CLASSES, TrafficClass, mark
from common.transport.sockets import check_not_reset, do_not_pace_loopback
from common.transport.tcp_frames import ACK, MAX_UNACKED, MAX_UNACKED_BYTES, TURN_BYTES, Scratch, Status
from common.transport.tcp_sending import Flow, Frame

_REASONS = {status.value: status.name.lower().replace("_", " ") for status in Status}
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, with a reset instead of what has not been sent


class Connection:
    """One stream to one peer in one traffic class. Transfers share it frame by frame, in turn.

    Its end, for whatever reason, fails every transfer on it; the next transfer opens a new one.
    """

    def __init__(self, address: str, traffic_class: TrafficClass, timeout_s: float, ended: Callable[[], None]) -> None:
        self._address = address
        self._class = traffic_class
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._flows: set[Flow] = set()
        self._ready: deque[Flow] = deque()  # flows with frames to begin
        self._frame: tuple[Flow, Frame] | None = None  # being sent
        self._scratch = Scratch()
        self._unacked: deque[tuple[Flow, int]] = deque()  # of each frame sent: whose it is, its bytes
        self._unacked_bytes = 0
        self._acks = bytearray()
        self._writing = False
        self._connecting = self._loop.create_task(self._connect(timeout_s), name=f"connect {address}")
        self.open = True
        self.load = 0  # bytes of transfers that have not ended

    def add(self, flow: Flow) -> None:
        num_bytes = flow.job.batch.num_bytes
        self._flows.add(flow)
        self.load += num_bytes

        def ended(_: object) -> None:
            self._flows.discard(flow)
            self.load -= num_bytes

        flow.done.add_done_callback(ended)
        self._ready.append(flow)
        if self._sock is not None and not self._writing:
            self._on_writable()  # a socket that is not waited for has room

    def expire(self, flow: Flow) -> None:
        """Its deadline has passed. What has begun can only be ended together with the stream."""
        if flow.unacked:
            self.reset(f"{self._address} did not take a transfer in time")
        else:
            flow.stop(f"{self._address} did not take the transfer in time")

    def reset(self, reason: str) -> None:
        """End the stream, now: the peer drops what it has not read yet. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._connecting.cancel()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._sock.close()
        self._frame = None
        for flow in list(self._flows):
            flow.unacked = 0
            flow.stop(reason)
        self._ended()

    async def _connect(self, timeout_s: float) -> None:
        try:
            family, sockaddr = resolve(self._address)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                mark(sock, self._class)
                do_not_pace_loopback(sock, str(sockaddr[0]))
                async with asyncio.timeout(timeout_s):
                    await self._loop.sock_connect(sock, sockaddr)
            except BaseException:
                sock.close()
                raise
        except (OSError, ValueError) as error:
            self.reset(f"cannot connect to {self._address}: {str(error) or type(error).__name__}")
            return
        self._sock = sock
        self._loop.add_reader(sock, self._on_readable)
        self._watch()

    @property
    def _has_room(self) -> bool:
        """For another frame to be under way."""
        return len(self._unacked) < MAX_UNACKED and self._unacked_bytes < MAX_UNACKED_BYTES

    def _watch(self) -> None:
        """Wait for room in the socket while there is something to send, and only then."""
        if self._sock is None or not self.open:
            return
        wanted = self._frame is not None or (bool(self._ready) and self._has_room)
        if wanted and not self._writing:
            self._loop.add_writer(self._sock, self._on_writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._sock)
        self._writing = wanted

    def _on_writable(self) -> None:
        assert self._sock is not None
        try:
            turn = 0
            while turn < TURN_BYTES:
                if self._frame is None:
                    self._frame = self._next_frame()
                if self._frame is None:
                    break
                flow, frame = self._frame
                turn += frame.send(self._sock)
                if frame.whole:
                    self._unacked.append((flow, frame.num_bytes))
                    self._unacked_bytes += frame.num_bytes
                    self._frame = None
        except BlockingIOError:
            pass
        except OSError as error:
            self.reset(f"{self._address}: {error}")
            return
        self._watch()

    def _next_frame(self) -> tuple[Flow, Frame] | None:
        """Of the flow whose turn it is; flows that were stopped while they waited are passed over."""
        while self._ready and self._has_room:
            flow = self._ready.popleft()
            if flow.more:
                flow.unacked += 1
                frame = flow.begin(TRAFFIC_CLASSES.index(self._class), self._scratch)
                if flow.more:
                    self._ready.append(flow)
                return flow, frame
        return None

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            received = self._sock.recv(64 * ACK.size)
        except BlockingIOError:
            return
        except OSError as error:
            self.reset(f"{self._address}: {error}")
            return
        if not received:
            self.reset(f"{self._address} closed the connection")
            return
        self._acks += received
        whole = len(self._acks) - len(self._acks) % ACK.size
        acks = bytes(self._acks[:whole])
        del self._acks[:whole]
        for number, status in ACK.iter_unpack(acks):
            if not self._unacked or self._unacked[0][0].number != number:
                self.reset(f"{self._address} acknowledged what was not sent")
                return
            flow, num_bytes = self._unacked.popleft()
            self._unacked_bytes -= num_bytes
            flow.unacked -= 1
            if status == Status.OK:
                flow.settle()
            else:
                flow.stop(f"{self._address} refused the write: {_REASONS.get(status, status)}")
        try:
            check_not_reset(self._sock)
        except OSError as error:
            self.reset(f"{self._address}: {error}")
        self._watch()


def resolve(address: str) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """HOST:PORT or [HOST]:PORT with a numeric host, for connect(). ValueError or OSError."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    return found[0][0], found[0][4]
