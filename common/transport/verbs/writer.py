"""The writing end of a connection: transfers cut into lists of work requests, which take turns on its queue pair."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.transport.base import TransferError, check_runs, cut_runs
from common.transport.classes import TRAFFIC_CLASSES, TrafficClass
from common.transport.mover import Job
from common.transport.verbs.control import (
    Ask,
    ControlStream,
    Denied,
    Granted,
    Hello,
    Quiet,
    Refused,
    Welcome,
    Withdraw,
)
from common.transport.verbs.device import Device, Registration
from common.transport.verbs.queue_pair import QueuePair
from common.transport.verbs.window import Window
from common.transport.verbs.work import LIST_WRITES
from common.wire import PROTOCOL_VERSION

#: A list has at most so many bytes: 64 Layer Blocks of larger models. It bounds how long a stopped transfer goes on.
MAX_LIST_BYTES = 4 << 20
#: Lists of one connection that may be under way. The receiver's credits can only lower it.
MAX_LISTS = 8
#: One of so many lists is signalled: taking a completion costs as much as aiming a hundred writes.
SIGNAL_EVERY = 4
#: Lists that the send queue holds.
PLACES = MAX_LISTS + SIGNAL_EVERY


class Flow:
    """One transfer. done: None once every byte is in place, else what went wrong; both memories are quiet then."""

    def __init__(self, job: Job, source: Registration) -> None:
        self.job = job
        self.source = source
        self.granted: Granted | None = None
        self.lists: deque[NDArray[np.int64]] = deque()
        self.posted = 0  # lists under way
        self.failure: str | None = None
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def begin(self, granted: Granted) -> None:
        """Cut it into lists with the NICs' addresses. TransferError if it leaves the region as its owner knows it."""
        runs = self.job.batch.runs
        check_runs(runs, self.job.source.size, granted.size)
        self.granted = granted
        writes = runs + np.array([self.source.address, granted.address, 0])
        self.lists.extend(cut_runs(writes, MAX_LIST_BYTES, LIST_WRITES))

    def stop(self, failure: str) -> None:
        """Begin no further list."""
        self.failure = self.failure or failure
        self.lists.clear()
        self.settle()

    def settle(self) -> None:
        if not self.lists and not self.posted and not self.done.done():
            self.done.set_result(self.failure)


class Connection:
    """One queue pair to one peer in one traffic class. Its end fails every transfer on it; the next one opens another.

    endpoint: HOST:PORT/INCARNATION of the peer. posted(writes) is called for each list.
    """

    def __init__(
        self,
        device: Device,
        endpoint: str,
        traffic_class: TrafficClass,
        timeout_s: float,
        posted: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._device = device
        self._class = traffic_class
        self._posted_list = posted
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._address, _, self._incarnation = endpoint.partition("/")
        self._stream: ControlStream | None = None
        self._pair: QueuePair | None = None
        self._window: Window | None = None
        self._flows: set[Flow] = set()
        self._grants: dict[bytes, Granted] = {}
        self._asked: dict[bytes, list[Flow]] = {}
        self._ready: deque[Flow] = deque()  # flows with lists to post
        self._posted: deque[Flow] = deque()  # one entry a list under way
        self._pumping = False
        self._life = self._loop.create_task(self._live(timeout_s), name=f"verbs {self._address}")
        self.open = True

    def add(self, flow: Flow) -> None:
        key = flow.job.batch.target.key
        self._flows.add(flow)
        flow.done.add_done_callback(lambda _: self._forget(flow, key))
        if key in self._grants:
            self._begin(flow, self._grants[key])
        elif key in self._asked:
            self._asked[key].append(flow)
        else:
            self._asked[key] = [flow]
            self._ask(key)

    def _forget(self, flow: Flow, key: bytes) -> None:
        self._flows.discard(flow)
        waiting = self._asked.get(key, [])
        if flow in waiting:
            waiting.remove(flow)

    def expire(self, flow: Flow) -> None:
        """Its deadline has passed. What has been posted can only be ended together with the queue pair."""
        if flow.posted:
            self.reset(f"{self._address} did not take a transfer in time")
        else:
            flow.stop(f"{self._address} did not take the transfer in time")

    def reset(self, reason: str) -> None:
        """End it, now: our memory is not read any more. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._life.cancel()
        if self._pair is not None:
            self._pair.close()
        if self._stream is not None:
            self._stream.close()
        for flow in list(self._flows):
            flow.posted = 0
            flow.stop(reason)
        self._ended()

    async def closed(self) -> None:
        """After reset()."""
        await asyncio.wait({self._life})

    # -- the control stream --

    async def _live(self, timeout_s: float) -> None:
        """Connect, then hear what the peer says until it leaves."""
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._connect()
            while True:
                self._on_message(stream, await stream.receive())
        except TimeoutError:
            self.reset(f"{self._address} did not answer in time")
        except (OSError, ValueError) as error:
            self.reset(f"{self._address}: {str(error) or type(error).__name__}")

    async def _connect(self) -> ControlStream:
        host, _, port = self._address.rpartition(":")
        stream = self._stream = await ControlStream.connect(host.strip("[]"), int(port), self._device.place.address)
        self._pair = QueuePair(self._device, self, PLACES * LIST_WRITES, MAX_LISTS)
        index = TRAFFIC_CLASSES.index(self._class)
        stream.send(Hello(PROTOCOL_VERSION, self._incarnation, index, self._pair.address))
        answer = await stream.receive()
        if isinstance(answer, Refused):
            raise ConnectionError(answer.reason)
        if not isinstance(answer, Welcome):
            raise ConnectionError(f"said {type(answer).__name__} instead of Welcome")
        self._pair.connect(answer.pair, self._class)
        self._window = Window(min(MAX_LISTS, answer.credits), PLACES, SIGNAL_EVERY)
        for key in self._asked:
            stream.send(Ask(key))
        return stream

    def _ask(self, key: bytes) -> None:
        if self._window is not None and self._stream is not None:
            self._stream.send(Ask(key))

    def _on_message(self, stream: ControlStream, msg: Any) -> None:
        match msg:
            case Granted():
                self._grants[msg.key] = msg
                for flow in self._asked.pop(msg.key, []):
                    self._begin(flow, msg)
            case Denied():
                for flow in self._asked.pop(msg.key, []):
                    flow.stop(f"{self._address} refused the write: no such region")
            case Withdraw():
                self._withdraw(stream, msg.key)
            case _:
                raise ConnectionError(f"said {type(msg).__name__}")

    def _withdraw(self, stream: ControlStream, key: bytes) -> None:
        self._grants.pop(key, None)
        flows = [flow for flow in self._flows if flow.granted is not None and flow.granted.key == key]
        for flow in flows:
            if flow.lists:
                flow.stop(f"{self._address} refused the write: the region was withdrawn")
        waiting = [flow.done for flow in flows if not flow.done.done()]
        left = len(waiting)

        def quiet(_: object) -> None:
            nonlocal left
            left -= 1
            if not left and self.open:
                stream.send(Quiet(key))

        for done in waiting:
            done.add_done_callback(quiet)
        if not waiting:
            stream.send(Quiet(key))

    # -- the queue pair --

    def _begin(self, flow: Flow, granted: Granted) -> None:
        if flow.done.done():
            return
        try:
            flow.begin(granted)
        except TransferError as error:
            flow.stop(f"{self._address} refused the write: {error.message}")
            return
        self._ready.append(flow)
        self._pump()

    def _pump(self) -> None:
        """Post what the window has room for, a list a turn of the event loop. Stopped flows are passed over."""
        if self._pumping or not self.open or self._window is None or not self._window.open:
            return
        while self._ready:
            flow = self._ready.popleft()
            if flow.lists:
                self._post(flow, self._window)
                break
        if self.open and self._ready:
            self._pumping = True
            self._loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pumping = False
        self._pump()

    def _post(self, flow: Flow, window: Window) -> None:
        assert self._pair is not None and flow.granted is not None
        writes = flow.lists.popleft()
        flow.posted += 1
        if flow.lists:
            self._ready.append(flow)
        self._posted.append(flow)
        number, signalled = window.post()
        head = self._device.work.aim(writes, flow.source.lkey, flow.granted.rkey, number, signalled)
        try:
            self._pair.post(head)
        except ConnectionError as error:
            self.reset(f"{self._address}: {error}")
            return
        self._posted_list(len(writes))

    def noticed(self, number: int) -> None:
        assert self._pair is not None and self._window is not None
        try:
            self._window.acknowledge(number)
        except ValueError as error:
            self.reset(f"{self._address}: {error}")
            return
        self._pair.receive(1)

    def sent(self) -> None:
        assert self._window is not None
        try:
            self._window.sent()
        except ValueError as error:
            self.reset(f"{self._address}: {error}")

    def drained(self) -> bool:
        if self._window is None:
            return False
        for _ in range(self._window.take_over()):
            flow = self._posted.popleft()
            flow.posted -= 1
            flow.settle()
        self._pump()
        return self._window.waits_for_sent

    def failed(self, reason: str) -> None:
        self.reset(f"{self._address}: {reason}")
