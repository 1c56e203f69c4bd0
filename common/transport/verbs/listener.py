"""The owning end of connections: takes writers in, tells them where regions lie, acknowledges their notices."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from common.errors import ConfigError
from common.log import get_logger
from common.metrics import Metrics
from common.transport.classes import TRAFFIC_CLASSES
from common.transport.mover import Regions
from common.transport.verbs.control import (
    Ask,
    ControlStream,
    Denied,
    EndOfStream,
    Granted,
    Hello,
    QueuePairAddress,
    Quiet,
    Refused,
    Welcome,
    Withdraw,
)
from common.transport.verbs.device import Device, Registration
from common.transport.verbs.nics import Place
from common.transport.verbs.queue_pair import QueuePair
from common.wire import PROTOCOL_VERSION

#: Writers times traffic classes, with room to spare; further ones are turned away.
MAX_CONNECTIONS = 1024
#: Notices that a writer may have on their way.
CREDITS = 16
#: One of so many acknowledgements is signalled, which tells that those before it have gone out as well.
SIGNAL_EVERY = CREDITS // 2
#: A writer gets so long to leave a region that is withdrawn, seconds; then its connections are cut off.
WITHDRAW_S = 2.0
_WRAP = 1 << 32


class Listener:
    """Accepts writers on the interface's address. registrations: of regions, by key. endpoint: where it listens, as
    HOST:PORT/INCARNATION."""

    def __init__(
        self,
        device: Device,
        regions: Regions,
        registrations: dict[bytes, Registration],
        metrics: Metrics,
        timeout_s: float,
    ) -> None:
        self.endpoint = ""
        self._device = device
        self._regions = regions
        self._registrations = registrations
        self._timeout_s = timeout_s
        self._incarnation = secrets.token_hex(8)
        self._server: asyncio.Server | None = None
        self._serving: set[Serving] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = metrics.counter("transport_refused", "Frames and connections refused, by reason", ("reason",))
        self._notices = metrics.counter("transport_notices", "Lists of writes that peers have completed here")

    async def start(self) -> None:
        """ConfigError if the address cannot be bound."""
        address = self._device.place.address
        try:
            self._server = await asyncio.start_server(self._accept, address, 0)
        except OSError as error:
            raise ConfigError(f"cannot listen for RDMA connections on {address}: {error}") from None
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"{f'[{address}]' if ':' in address else address}:{port}/{self._incarnation}"

    async def close(self) -> None:
        """Cut every writer off. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def withdraw(self, key: bytes) -> None:
        """Returns once no writer writes into that region any more: those that do not say so are cut off."""
        holders = [serving for serving in self._serving if key in serving.granted]
        if not holders:
            return
        waits = {serving.withdraw(key): serving for serving in holders}
        _, late = await asyncio.wait(waits, timeout=WITHDRAW_S)
        for wait in late:
            waits[wait].close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        stream = ControlStream(reader, writer)
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                self._refused.labels("too_many").inc()
                return
            async with asyncio.timeout(self._timeout_s):
                hello = await stream.receive()
            await self._serve(stream, hello)
        except EndOfStream:
            pass
        except TimeoutError:
            self._refused.labels("late").inc()
        except OSError:
            self._refused.labels("malformed").inc()
        except asyncio.CancelledError:
            pass  # close() waits for this
        finally:
            self._tasks.discard(task)
            stream.close()

    async def _serve(self, stream: ControlStream, hello: Any) -> None:
        reason = refusal(hello, self._incarnation, self._device.place)
        if reason is not None:
            self._refused.labels("handshake").inc()
            stream.send(Refused(reason))
            return
        try:
            serving = Serving(self._device, stream, hello, self._notices.inc)
        except ConnectionError as error:
            self._refused.labels("queue_pair").inc()
            stream.send(Refused(str(error)))
            return
        self._serving.add(serving)
        try:
            while True:
                match await stream.receive():
                    case Ask(key):
                        stream.send(self._answer(serving, key))
                    case Quiet(key):
                        serving.quiet(key)
                    case other:
                        raise ConnectionError(f"said {type(other).__name__}")
        finally:
            self._serving.discard(serving)
            serving.close()

    def _answer(self, serving: Serving, key: bytes) -> Granted | Denied:
        region = self._regions.get(key)
        if region is None or not region.registered:
            self._refused.labels("unknown_region").inc()
            return Denied(key)
        registration = self._registrations.get(key)
        if registration is None:
            return Denied(key)
        serving.granted.setdefault(key, asyncio.get_running_loop().create_future())
        return Granted(key, registration.address, registration.rkey, region.memory.size)


class Serving:
    """One writer's queue pair. granted: the keys it may write under, each with what is done once it does no more. count
    is called for each notice."""

    def __init__(self, device: Device, stream: ControlStream, hello: Hello, count: Callable[[], None]) -> None:
        self.granted: dict[bytes, asyncio.Future[None]] = {}
        self._count = count
        self._stream = stream
        self._notices = 0  # that have come
        self._unacknowledged = False
        self._acknowledged = 0  # acknowledgements sent
        self._completed = 0  # of these, how many are known to have gone out
        self._pair = QueuePair(device, self, CREDITS, CREDITS)
        try:
            self._pair.connect(hello.pair, TRAFFIC_CLASSES[hello.traffic_class])
        except BaseException:
            self._pair.close()
            raise
        stream.send(Welcome(self._pair.address, CREDITS))

    def withdraw(self, key: bytes) -> asyncio.Future[None]:
        """Tell the writer to leave that region. Done once it has, or is cut off."""
        self._stream.send(Withdraw(key))
        return self.granted[key]

    def quiet(self, key: bytes) -> None:
        left = self.granted.pop(key, None)
        if left is not None and not left.done():
            left.set_result(None)

    def close(self) -> None:
        """Cut it off: its NIC cannot write here any more. Idempotent."""
        self._pair.close()
        self._stream.close()
        for key in list(self.granted):
            self.quiet(key)

    # -- the queue pair --

    def noticed(self, number: int) -> None:
        if number != self._notices % _WRAP:
            self.failed("a notice out of order")
            return
        self._notices += 1
        self._count()
        self._unacknowledged = True
        self._pair.receive(1)

    def sent(self) -> None:
        self._completed += SIGNAL_EVERY

    def drained(self) -> bool:
        """One acknowledgement for all that has come, as soon as one can be sent."""
        if not self._unacknowledged:
            return False
        if self._acknowledged - self._completed == CREDITS:
            return True
        self._unacknowledged = False
        self._acknowledged += 1
        try:
            self._pair.notify(self._notices % _WRAP, signalled=self._acknowledged % SIGNAL_EVERY == 0)
        except ConnectionError as error:
            self.failed(str(error))
        return False

    def failed(self, reason: str) -> None:
        get_logger().warning("RDMA connection of a peer failed", reason=reason)
        self.close()


def refusal(hello: Any, incarnation: str, place: Place) -> str | None:
    """Why there can be no connection; None if there can."""
    if not isinstance(hello, Hello):
        return f"expected Hello, not {type(hello).__name__}"
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version} is not ours, {PROTOCOL_VERSION}: install one version everywhere"
    if hello.incarnation != incarnation:
        return "the transport at this address is another one by now"
    if not 0 <= hello.traffic_class < len(TRAFFIC_CLASSES):
        return f"there is no traffic class {hello.traffic_class}"
    return _mismatch(hello.pair, place)


def _mismatch(theirs: QueuePairAddress, place: Place) -> str | None:
    if theirs.ethernet != place.port.ethernet:
        kinds = {True: "RoCE", False: "InfiniBand"}
        return (
            f"our {place.port.device} is {kinds[place.port.ethernet]}, your device is {kinds[theirs.ethernet]}: "
            "set snic and cnic of network to devices of one fabric"
        )
    if theirs.mtu != place.mtu:
        return (
            f"the path MTU of our {place.port.device} is {place.mtu}, yours is {theirs.mtu}: give both interfaces one "
            f"MTU, or set network.rdma.mtu to {min(place.mtu, theirs.mtu)} on both sides"
        )
    return None
