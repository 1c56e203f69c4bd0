"""The life of a process: start -> ready -> serve -> drain -> close.

start() binds and opens everything, then registers with the scheduler and heartbeats; a peer that is not there yet is
waited for, with a log line that says for whom. SIGTERM or SIGINT drains within timeouts.drain_s and exits 0; a second
signal ends at once. A background task that dies takes the process down with it: a half-alive service helps nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from common.config import Config, LogConfig
from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Faults
from common.log import get_logger, setup_logging
from common.messages import Heartbeat, Leave, Member, MemberJoined, MemberLeft, Register, Registered
from common.metrics import Metrics
from common.rpc import Link, Node, Peer
from common.transport.memory import host_identity
from common.types import Role
from common.wire import PROTOCOL_VERSION


class Service:
    """Base of every process. Subclasses fill in open(), describe(), drain() and shut()."""

    role: Role

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.incarnation = f"{name}.{secrets.token_hex(8)}"
        self.node_name = config.network.node or name
        self.metrics = Metrics()
        self.faults = Faults(config.faults, name)
        self.node = Node(self.incarnation, config.security, self.metrics, self.faults)
        self.members: dict[str, Member] = {}
        self.draining = False
        self.log = get_logger().bind(process=name)
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.companions = AsyncExitStack()  # what this service leans on to its very end; closed last
        self._registered = False
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lag = self.metrics.gauge("event_loop_lag_seconds", "How late the event loop woke up, last heartbeat")

    # -- for subclasses --

    async def open(self) -> None:
        """Bring up everything but the control endpoint, which is bound already."""

    def describe(self, member: Member) -> Member:
        """Add what this role registers with (manifest, capacity ...)."""
        return member

    def member_joined(self, member: Member) -> None:
        """A process is new to the cluster (or was there when we came)."""

    def member_left(self, member: Member, reason: str) -> None:
        """A process is gone: whatever it held or was writing is void."""

    async def drain(self) -> None:
        """Finish what is in hand; take nothing new (self.draining is set)."""

    async def shut(self) -> None:
        """Free everything that open() took. Called once, also after a failed open()."""

    # -- life --

    @property
    def control(self) -> str:
        """Where this process's ROUTER binds."""
        host = self.config.network.host
        return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"

    @property
    def scheduler(self) -> Link:
        return self.node.link(self.config.scheduler.control)

    async def start(self) -> None:
        """Returns when ready. ConfigError or DualPathError if it cannot become so."""
        await self.node.bind(self.control)
        await self.open()
        if self.role is not Role.SCHEDULER:
            self.node.on(MemberJoined, self._on_joined)
            self.node.on(MemberLeft, self._on_left)
            await self._register()

    async def stop(self, drain: bool = True) -> None:
        """Drain (bounded) and close. Safe after a failed start, and a second time."""
        if self._stopped:
            return
        self.draining = self._stopped = True
        if drain:
            try:
                async with asyncio.timeout(self.config.timeouts.drain_s):
                    if self._registered:
                        self._leave(final=False)
                    await self.drain()
            except TimeoutError:
                self.log.warning("drain did not end in time", seconds=self.config.timeouts.drain_s)
        if self._registered:
            self._leave(final=True)
        await self.node.silence()  # from here on no message starts anything
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.shut()
            await self.node.close()
        finally:
            await self.companions.aclose()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str, essential: bool = False) -> asyncio.Task[Any]:
        """Run a task that this service owns. If an essential one ends with an error the service fails."""
        task = asyncio.create_task(work, name=f"{self.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: self._task_ended(done, essential))
        return task

    def fail(self, error: BaseException) -> None:
        """This process cannot go on."""
        if self.failure is None and not self.draining:
            self.failure = error
            self.failed.set()

    def _task_ended(self, task: asyncio.Task[Any], essential: bool) -> None:
        if task.cancelled() or task.exception() is None:
            return
        self.log.error("task failed", task=task.get_name(), exc_info=task.exception())
        if essential:
            self.fail(task.exception() or RuntimeError(task.get_name()))

    # -- membership --

    async def _register(self) -> None:
        member = self.describe(
            Member(
                self.role,
                self.name,
                self.incarnation,
                self.node.endpoint,
                self.node_name,
                os.getpid(),
                host_identity(),
            )
        )
        deadline = asyncio.get_running_loop().time() + self.config.timeouts.register_s
        while True:
            try:
                answer: Registered = await self.scheduler.call(Register(PROTOCOL_VERSION, member), 2.0)
                break
            except DualPathError as error:
                if error.code is not ErrorCode.UNREACHABLE:
                    raise ConfigError(f"the scheduler refused {self.name}: {error.message}") from None
                if asyncio.get_running_loop().time() > deadline:
                    raise ConfigError(f"no scheduler at {self.config.scheduler.control}: start it first") from None
                self.log.info("waiting for the scheduler", endpoint=self.config.scheduler.control)
        self._registered = True
        for other in answer.members:
            self._join(other)
        self.spawn(self._heartbeat(answer.heartbeat_s), "heartbeat", essential=True)

    async def _heartbeat(self, interval: float) -> None:
        """Renew our lease. Who cannot reach the scheduler ends before others rely on its end, also if it could still
        reach them: they reuse the memory that it writes into."""
        loop = asyncio.get_running_loop()
        patience = self.config.timeouts.heartbeat_timeout_s
        while True:
            try:
                await self.scheduler.call(Heartbeat(self.incarnation, self.metrics.snapshot()), patience)
            except DualPathError as error:
                if error.code is ErrorCode.UNREACHABLE:
                    raise DualPathError(ErrorCode.ENGINE_LOST, f"no lease: {error.message}") from None
                self.log.warning("heartbeat refused", error=str(error))
            due = loop.time() + interval
            await asyncio.sleep(interval)
            self._lag.set(max(loop.time() - due, 0.0))

    def _leave(self, final: bool) -> None:
        try:
            self.scheduler.send(Leave(self.incarnation, final))
        except DualPathError:
            self.log.debug("the scheduler is gone already")

    def _on_joined(self, msg: MemberJoined, peer: Peer) -> None:
        self._join(msg.member)

    def _join(self, member: Member) -> None:
        if member.incarnation not in self.members:
            self.members[member.incarnation] = member
            self.node.welcome(member.control)
            self.member_joined(member)

    def _on_left(self, msg: MemberLeft, peer: Peer) -> None:
        if msg.incarnation == self.incarnation:
            self.fail(DualPathError(ErrorCode.ENGINE_LOST, f"the scheduler has given up on us: {msg.reason}"))
            return
        member = self.members.pop(msg.incarnation, None)
        if member is not None:
            self.log.info("member left", member=member.name, reason=msg.reason)
            self.member_left(member, msg.reason)
            self.node.unlink(member.control)

    def members_of(self, role: Role) -> list[Member]:
        return [member for member in self.members.values() if member.role is role]


def run_service(
    build: Callable[[], Service], log: LogConfig, ready_fd: int | None = None, lifeline_fd: int | None = None
) -> int:
    """Run one service as this process; returns its exit status.

    log: set up before build(), which binds loggers. ready_fd: one line of JSON (name, control, pid ...) goes there
    once the service is ready. lifeline_fd: end when the other end of this pipe closes, so that a launcher that is
    killed leaves nobody behind.
    """
    setup_logging(log.level, log.format)
    try:
        return uvloop.run(_run(build, ready_fd, lifeline_fd))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _run(build: Callable[[], Service], ready_fd: int | None, lifeline_fd: int | None) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    def orphaned() -> None:
        assert lifeline_fd is not None
        loop.remove_reader(lifeline_fd)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, signalled)
    if lifeline_fd is None:
        loop.add_signal_handler(signal.SIGINT, signalled)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for whoever started us
        loop.add_reader(lifeline_fd, orphaned)
    service = build()
    starting: asyncio.Task[Any] = asyncio.create_task(service.start())
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        starting.result()
        if ready_fd is not None:
            with os.fdopen(ready_fd, "w") as ready:
                ready.write(json.dumps(service_address(service)) + "\n")
        failing = asyncio.create_task(service.failed.wait())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        if service.failure is not None:
            service.log.error("service failed", error=str(service.failure))
            return 1
        return 0
    finally:
        stopping.cancel()
        await service.stop(drain=stop.is_set() and starting.done())


def service_address(service: Service) -> dict[str, Any]:
    """What a launcher learns from the ready line."""
    address = {"name": service.name, "role": service.role.value, "control": service.node.endpoint, "pid": os.getpid()}
    url = getattr(service, "url", None)
    return {**address, "url": url} if url else address
