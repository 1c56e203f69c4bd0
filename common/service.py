"""The life of a process: start -> ready -> serve -> drain -> close.

start() binds and opens everything, then registers with the scheduler (common.enrolment); a peer that is not there yet
is waited for, with a log line that says for whom. SIGTERM or SIGINT drains within timeouts.drain_s and exits 0 (see
common.process). A background task that dies takes the process down with it: a half-alive service helps nobody.

From its first moment to its last a process answers operators over HTTP (common.pages).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from common.clock import monotonic
from common.config import Config
from common.enrolment import Enrolment
from common.errors import DualPathError, ErrorCode
from common.faults import Faults
from common.health import HealthServer
from common.log import get_logger
from common.messages import Member, MemberJoined, MemberLeaving, MemberLeft, Registered
from common.metrics import Metrics
from common.pages import pages
from common.rpc import Link, Node, Peer
from common.tracing import UNTRACED, open_tracer
from common.transport.memory import host_identity
from common.types import Role


class Service:
    """Base of every process. Subclasses fill in open(), describe(), drain() and shut()."""

    role: Role
    #: Roles without a live member of which this process cannot do its work, or not all of it.
    needs: tuple[Role, ...] = ()

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.incarnation = f"{name}.{secrets.token_hex(8)}"
        self.node_name = config.network.node or name
        self.metrics = Metrics()
        self.faults = Faults(config.faults, name)
        self.tracer = UNTRACED  # until start()
        self.node = Node(self.incarnation, config.security, self.metrics, self.faults)
        self.members: dict[str, Member] = {}
        self.leaving: set[str] = set()  # members, by incarnation, that finish what they have
        self.draining = False
        self.log = get_logger().bind(process=name)
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.companions = AsyncExitStack()  # what this service leans on to its very end; closed last
        self.health = HealthServer(config.health.host, config.health.port, pages(self))
        self._enrolment: Enrolment | None = None
        self._heartbeat: asyncio.Task[Any] | None = None
        self._unconfirmed: set[str] = set()  # members that we know of, and the scheduler of the moment does not
        self._unconfirmed_timer: asyncio.TimerHandle | None = None
        self._registered = False
        self._started_at: float | None = None
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metrics.observe_process(name, self.role.value, self.node_name)
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

    def scheduler_replaced(self) -> None:
        """Another scheduler is about to have us. What the last one knew of requests has gone with it: each that has not
        ended goes on in a new attempt, from what its front end has."""

    async def drain(self) -> None:
        """Finish what is in hand; take nothing new (self.draining is set)."""

    def hand_over(self) -> None:
        """The drain has taken too long: give up what is in hand, so that it goes on elsewhere."""

    def calm(self) -> bool | None:
        """Whether so little is in hand that nobody minds a pause; None: Python's garbage collector may choose."""
        return None

    async def break_off(self) -> None:
        """End what is in flight to peers, now: the handlers and tasks that are being cancelled wait for its end. Called
        once, also after a failed open(). DualPathError if a peer does not let go."""

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
        self.tracer = open_tracer(self.config.trace, self.name, self.role.value, self.node_name)
        await self.health.start()
        await self.node.bind(self.control)
        await self.open()
        if self.role is not Role.SCHEDULER:
            self.node.on(MemberJoined, self._on_joined)
            self.node.on(MemberLeft, self._on_left)
            self.node.on(MemberLeaving, lambda msg, peer: self.leaving.add(msg.incarnation))
            await self._enrol()
        self._started_at = monotonic()
        self.log.info("started", control=self.node.endpoint, health=self.health.url)

    async def stop(self, drain: bool = True) -> None:
        """Drain (bounded; what has not started has nothing to finish) and close. Safe after a failed start, and a
        second time."""
        if self._stopped:
            return
        self.draining = self._stopped = True
        if drain and self._started_at is not None:
            await self._drain()
        if self._heartbeat is not None:
            self._heartbeat.cancel()  # who has left does not register again
        if self._registered and self._enrolment is not None:
            await self._enrolment.leave(final=True)
        if self._unconfirmed_timer is not None:
            self._unconfirmed_timer.cancel()
        try:
            await asyncio.gather(self._end_tasks(), self._break_off())
            await self.shut()
            await self.node.close()
            await self.tracer.close()
        finally:
            await self.health.close()
            await self.companions.aclose()

    async def _break_off(self) -> None:
        try:
            await self.break_off()
        except DualPathError as error:  # a peer still holds on to memory of ours, which goes with the process
            self.log.warning("what was in flight has not ended in order", error=str(error))

    async def _end_tasks(self) -> None:
        await self.node.silence()  # from here on no message starts anything
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drain(self) -> None:
        self.log.info("draining", seconds=self.config.timeouts.drain_s)
        try:
            async with asyncio.timeout(self.config.timeouts.drain_s):
                if self._registered and self._enrolment is not None:
                    await self._enrolment.leave(final=False)
                await self.drain()
        except TimeoutError:
            self.log.warning("drain did not end in time", seconds=self.config.timeouts.drain_s)
            self.hand_over()

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

    async def _enrol(self) -> None:
        member = self.describe(
            Member(
                self.role,
                self.name,
                self.incarnation,
                self.node.endpoint,
                self.node_name,
                os.getpid(),
                host_identity(),
                health=self.health.url,
            )
        )
        self._enrolment = Enrolment(
            member,
            lambda: self.scheduler,
            self.config.timeouts,
            self.metrics.snapshot,
            self._on_registered,
            self._on_scheduler_replaced,
            self._lag.set,
        )
        await self._enrolment.begin()
        self._registered = True
        self._miss(*self.needs)
        self._heartbeat = self.spawn(self._enrolment.keep(), "heartbeat", essential=True)

    async def enrolled(self) -> None:
        """Returns while a scheduler has us: at once, or when the next one does."""
        if self._enrolment is not None:
            await self._enrolment.held.wait()

    def _on_registered(self, answer: Registered) -> None:
        for other in answer.members:
            self._join(other)
        if self._unconfirmed:  # those that live come back to the new scheduler, as we did; see common.enrolment
            timeouts = self.config.timeouts
            patience = timeouts.heartbeat_timeout_s + timeouts.heartbeat_s
            self._unconfirmed_timer = asyncio.get_running_loop().call_later(patience, self._forget_unconfirmed)

    def _on_scheduler_replaced(self) -> None:
        self._unconfirmed = set(self.members)
        if self._unconfirmed_timer is not None:
            self._unconfirmed_timer.cancel()
        self.scheduler_replaced()

    def _forget_unconfirmed(self) -> None:
        for incarnation in self._unconfirmed:
            self._part(incarnation, "has not come back to the new scheduler")
        self._unconfirmed.clear()

    def _miss(self, *roles: Role) -> None:
        """Say so if there is none of a role that we need."""
        for role in roles:
            if role in self.needs and not self.members_of(role):
                self.log.info("waiting for a process", role=role.value)

    def _on_joined(self, msg: MemberJoined, peer: Peer) -> None:
        self._join(msg.member)

    def _join(self, member: Member) -> None:
        self._unconfirmed.discard(member.incarnation)
        if member.incarnation not in self.members:
            if any(other.control == member.control for other in self.members.values()):
                self.node.unlink(member.control)  # it has died: what it was asked is never answered
            self.members[member.incarnation] = member
            self.node.welcome(member.control)
            self.member_joined(member)

    def _on_left(self, msg: MemberLeft, peer: Peer) -> None:
        if msg.incarnation == self.incarnation:
            self.fail(DualPathError(ErrorCode.ENGINE_LOST, f"the scheduler has given up on us: {msg.reason}"))
            return
        self._part(msg.incarnation, msg.reason)

    def _part(self, incarnation: str, reason: str) -> None:
        member = self.members.pop(incarnation, None)
        self.leaving.discard(incarnation)
        if member is not None:
            self.log.info("member left", member=member.name, reason=reason)
            self.member_left(member, reason)
            if all(other.control != member.control for other in self.members.values()):  # else it is another's now
                self.node.unlink(member.control)
            self._miss(member.role)

    def members_of(self, role: Role) -> list[Member]:
        return [member for member in self.members.values() if member.role is role]

    # -- for operators --

    def not_ready(self) -> DualPathError | None:
        """Why no work can be taken now, or None."""
        if self.failure is not None:
            return DualPathError(ErrorCode.INTERNAL, f"{self.name} has failed: {self.failure}")
        if self.draining:
            return DualPathError(ErrorCode.DRAINING, f"{self.name} is shutting down")
        if self._started_at is None:
            return DualPathError(ErrorCode.UNREACHABLE, f"{self.name} is starting")
        alone_since = None if self._enrolment is None else self._enrolment.alone_since
        if alone_since is not None and monotonic() - alone_since > self.config.timeouts.engines_s:
            return DualPathError(ErrorCode.UNREACHABLE, "waiting for the scheduler")  # a restart takes less
        return None

    def facts(self) -> dict[str, Any]:
        """What this process is and whom it waits for."""
        return {
            "name": self.name,
            "role": self.role.value,
            "node": self.node_name,
            "incarnation": self.incarnation,
            "control": self.node.endpoint,
            "uptime_s": 0.0 if self._started_at is None else round(monotonic() - self._started_at, 3),
            "waits_for": [role.value for role in self.needs if not self.members_of(role)],
        }
