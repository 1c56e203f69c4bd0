"""The scheduler process: turns messages into policy events and policy actions into messages."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from itertools import takewhile
from typing import TextIO

from common.clock import monotonic
from common.config import Config
from common.errors import ConfigError, DualPathError, ErrorCode
from common.messages import (
    Accepted,
    Assign,
    Cancel,
    Done,
    Fetch,
    GetStatus,
    HandedOver,
    Heartbeat,
    Leave,
    Member,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    MemberStatus,
    PrefillDone,
    Register,
    Registered,
    RequestDone,
    RequestFailed,
    Status,
    Submit,
)
from common.rpc import Link, Peer
from common.service import Service
from common.types import Request, RequestKey, Role, hit_block_limit
from services.scheduler.lookup import Lookup
from services.scheduler.members import Members
from services.scheduler.notices import Notices
from services.scheduler.policy import (
    Action,
    CancelOn,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Event,
    Fail,
    Fetched,
    KvHandedOver,
    Load,
    Policy,
    PolicyConfig,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
    Start,
)
from services.scheduler.policy.record import Recorder, Step
from services.scheduler.presence import Presence

ENGINES = (Role.PREFILL, Role.DECODE)
#: Seconds in which front ends that are told to end when we are say so.
HEAR_S = 1.0


@dataclass(slots=True)
class _Live:
    request: Request
    frontend: str
    hit_blocks: int
    since: float
    lookup: asyncio.Task[None] | None = None


class Scheduler(Service):
    """One per cluster. All state is in Members, Policy and the table of live requests."""

    role = Role.SCHEDULER

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self.registry = Members()
        scheduler = config.scheduler
        self.policy = Policy(
            PolicyConfig(
                scheduler.read_side,
                scheduler.alpha,
                scheduler.beta,
                scheduler.max_waiting,
                config.model.block_size,
            )
        )
        self._recorder: Recorder | None = None
        self._live: dict[RequestKey, _Live] = {}
        self._started: dict[str, int] = {}  # requests ever assigned to each live engine
        self._presence = Presence(self.registry, self.leaving)
        self._notices = Notices(self.node, self.registry)
        self._opened_at = monotonic()
        self._lookup = Lookup(self._gateways, config.model.block_size, config.timeouts, monotonic)
        self._waiting = self.metrics.gauge("requests_waiting", "Requests not yet assigned to both engines")
        self._running = self.metrics.gauge("requests_running", "Requests assigned and not finished")
        limit = self.metrics.gauge("requests_waiting_limit", "Waiting requests at which further ones are refused")
        limit.set(scheduler.max_waiting)
        self._num_members = self.metrics.gauge("members", "Processes that are registered, by role", ("role",))
        self._count_members()
        self._late = self.metrics.counter("messages_late", "Messages of attempts that have ended")

    @property
    def control(self) -> str:
        return self.config.scheduler.control

    @property
    def identity(self) -> Member:
        """This process, as others see it."""
        node = self.node
        pid, health = os.getpid(), self.health.url
        return Member(self.role, self.name, self.incarnation, node.endpoint, self.node_name, pid, health=health)

    async def open(self) -> None:
        path = self.config.scheduler.record
        if path:
            self._recorder = Recorder(_create(path), self.policy.config)
        on = self.node.on
        on(Register, self._on_register)
        on(Heartbeat, self._on_heartbeat)
        on(Leave, self._on_leave)
        on(GetStatus, self._on_status)
        on(Submit, self._on_submit)
        on(Cancel, self._on_cancel)
        on(Fetch, self._on_fetch)
        on(PrefillDone, lambda msg, peer: self._progress(PrefillEnded((msg.request_id, msg.attempt))))
        on(HandedOver, lambda msg, peer: self._progress(KvHandedOver((msg.request_id, msg.attempt))))
        on(RequestDone, lambda msg, peer: self._progress(RequestEnded((msg.request_id, msg.attempt))))
        on(RequestFailed, self._on_failed)
        self.spawn(self._watch(), "liveness", essential=True)

    # -- membership --

    def _on_register(self, msg: Register, peer: Peer) -> Registered:
        member = msg.member
        joined = self._joined(member) if member.role in ENGINES else None
        for old in self.registry.admit(msg.protocol, member, monotonic()):
            self._remove(old.incarnation, f"replaced by {member.incarnation}")
        self._count_members()
        self.node.welcome(member.control)
        others = [other for other in self.registry.all() if other.incarnation != member.incarnation]
        self._notices.broadcast(MemberJoined(member), others)
        for other in self.leaving:
            self._notices.tell(member, MemberLeaving(other))  # it has missed that
        if joined is not None:
            self._apply(joined)
        self.log.info("member joined", member=member.name, role=member.role.value)
        self._presence.joined()
        return Registered(self.config.timeouts.heartbeat_s, others, self.incarnation)

    @staticmethod
    def _joined(member: Member) -> EngineJoined:
        capacity = member.capacity
        if capacity is None:
            raise DualPathError(ErrorCode.BAD_REQUEST, f"engine {member.name} registers without a capacity")
        return EngineJoined(
            member.incarnation,
            member.role,
            member.node,
            member.group,
            capacity.buffer_blocks,
            capacity.device_tokens,
        )

    def _on_heartbeat(self, msg: Heartbeat, peer: Peer) -> Done:
        if msg.scheduler != self.incarnation:
            raise DualPathError(ErrorCode.STRANGER, "you are registered with another scheduler: register again")
        if not self.registry.seen(msg.incarnation, msg.counters, monotonic()):
            peer.send(MemberLeft(msg.incarnation, "", "not a member (any more): start again"))
        return Done()

    def _on_leave(self, msg: Leave, peer: Peer) -> Done:
        if msg.final:
            self._remove(msg.incarnation, "has left")
        elif self.registry.get(msg.incarnation) is not None:
            self.leaving.add(msg.incarnation)
            self._notices.broadcast(MemberLeaving(msg.incarnation), self.registry.all())
            self._apply(EngineDraining(msg.incarnation))
        return Done()

    async def _watch(self) -> None:
        """Give up on members whose heartbeats stop, and on requests whose end has got lost."""
        timeout = self.config.timeouts.heartbeat_timeout_s
        while True:
            await asyncio.sleep(self.config.timeouts.heartbeat_s)
            for member in self.registry.silent(timeout, monotonic()):
                self._remove(member.incarnation, f"no heartbeat for {timeout:g} s")
            for key in self._overdue(monotonic()):
                self._progress(RequestErred(key, "", ErrorCode.DEADLINE, "nobody has ended it in time"))

    def _overdue(self, now: float) -> list[RequestKey]:
        """Attempts that are older than a front end lets them become, or an engine: whose end is lost."""
        timeouts = self.config.timeouts
        limit = now - timeouts.request_s - timeouts.call_s - timeouts.heartbeat_s
        oldest_first = self._live.items()
        return [key for key, _ in takewhile(lambda item: item[1].since < limit, oldest_first)]

    def _remove(self, incarnation: str, reason: str) -> None:
        member = self.registry.remove(incarnation)
        if member is None:
            return
        self._count_members()
        self.leaving.discard(incarnation)
        if all(other.control != member.control for other in self.registry.all()):  # else its port is another's now
            self.node.unlink(member.control)
        self.log.info("member left", member=member.name, reason=reason)
        self._notices.tell(member, MemberLeft(incarnation, member.name, reason))
        self._notices.broadcast(MemberLeft(incarnation, member.name, reason), self.registry.all())
        if member.role in ENGINES:
            self._started.pop(incarnation, None)
            self._apply(EngineLeft(incarnation))
        elif member.role is Role.FRONTEND:
            for key in [key for key, live in self._live.items() if live.frontend == incarnation]:
                self._progress(RequestCancelled(key))

    def _count_members(self) -> None:
        for role in Role:
            if role is not self.role:
                self._num_members.labels(role.value).set(len(self.registry.of(role)))

    def _on_status(self, msg: GetStatus, peer: Peer) -> Status:
        members = [
            MemberStatus(member, self.registry.counters(member.incarnation), member.incarnation in self.leaving)
            for member in self.registry.all()
        ]
        members.insert(0, MemberStatus(self.identity, self.metrics.snapshot()))
        return Status(members, self.policy.num_waiting, self.policy.num_running)

    def _gateways(self) -> list[Link]:
        return [self.node.link(member.control) for member in self.registry.of(Role.STORAGE_GATEWAY)]

    # -- requests --

    def _on_submit(self, msg: Submit, peer: Peer) -> Accepted:
        """In order of arrival, so that a cancellation right behind finds it. No engine, or too many requests in the
        queue, is told later, by RequestFailed."""
        request = msg.request
        key = (request.request_id, request.attempt)
        if not request.well_formed(self.config.model.block_size):
            raise DualPathError(ErrorCode.BAD_REQUEST, "the prompt is not whole tokens, or its keys do not fit it")
        if self.draining:
            raise DualPathError(ErrorCode.DRAINING, "the scheduler is shutting down")
        limit = self.config.scheduler.max_waiting
        if len(self._live) - self.policy.num_running >= limit:
            raise DualPathError(ErrorCode.OVERLOADED, f"{limit} requests are waiting already")
        if key in self._live:
            raise DualPathError(ErrorCode.BAD_REQUEST, f"request {key} was submitted already")
        frontend = next((fe for fe in self.registry.of(Role.FRONTEND) if fe.control == request.reply_to), None)
        if frontend is None:
            raise DualPathError(ErrorCode.STRANGER, f"no front end is registered at {request.reply_to}")
        for older in [old for old in self._live if old[0] == request.request_id and old[1] < request.attempt]:
            self._progress(RequestCancelled(older))
        live = self._live[key] = _Live(request, frontend.incarnation, 0, monotonic())
        live.lookup = self.spawn(self._look_up(key, live), f"look up {request.request_id}", essential=True)
        return Accepted()

    async def _look_up(self, key: RequestKey, live: _Live) -> None:
        request, timeouts = live.request, self.config.timeouts
        block_size = self.config.model.block_size
        until = monotonic() + timeouts.engines_s
        await self._presence.wait(timeouts.engines_s, *ENGINES)
        if monotonic() - self._opened_at < timeouts.heartbeat_timeout_s:
            await self._presence.wait(timeouts.lookup_s, Role.STORAGE_GATEWAY)  # it comes back to us as everybody does
        if request.hit_tokens is None:
            asked = monotonic()
            live.hit_blocks = await self._lookup.hit_blocks(request)
            self.tracer.span("match", request.request_id, asked, blocks=live.hit_blocks)
        else:
            limit = hit_block_limit(request.num_tokens, block_size)
            live.hit_blocks = min(max(request.hit_tokens, 0) // block_size, limit)
        await self._presence.wait(until - monotonic(), *ENGINES)  # the only one may have left while we asked
        live.lookup = None
        num_blocks = -(-request.num_tokens // block_size)
        self._apply(RequestArrived(key, request.num_tokens, live.hit_blocks * block_size, num_blocks))

    def _on_cancel(self, msg: Cancel, peer: Peer) -> None:
        self._progress(RequestCancelled((msg.request_id, msg.attempt)))

    def _on_fetch(self, msg: Fetch, peer: Peer) -> None:
        loads = (
            Load(load.incarnation, load.seq, load.tok, load.read_q, load.read_rate, load.free_device_tokens, load.heard)
            for load in msg.loads
        )
        self._apply(Fetched(tuple(loads)))

    def _on_failed(self, msg: RequestFailed, peer: Peer) -> None:
        engine = getattr(peer, "identity", b"").decode()
        self._progress(RequestErred((msg.request_id, msg.attempt), engine, msg.code, msg.detail))

    def _progress(self, event: PrefillEnded | KvHandedOver | RequestEnded | RequestErred | RequestCancelled) -> None:
        """Apply an event about a request, unless that attempt has ended."""
        if event.key not in self._live:
            self._late.inc()
            return
        self._apply(event)
        if isinstance(event, RequestEnded | RequestCancelled):
            live = self._live.pop(event.key)
            if live.lookup is not None:
                live.lookup.cancel()

    def _apply(self, event: Event) -> None:
        now = monotonic()
        actions = self.policy.handle(event, now)
        if self._recorder is not None:
            self._recorder.write(Step(now, event, actions))
        for action in actions:
            self._execute(action)
        self._waiting.set(self.policy.num_waiting)
        self._running.set(self.policy.num_running)

    def _execute(self, action: Action) -> None:
        match action:
            case Start():
                live = self._live[action.key]
                prefill, decode = self.registry.get(action.prefill), self.registry.get(action.decode)
                assert prefill is not None and decode is not None, "the policy only knows members"
                # the decode side first: its staging is what the prefill side waits for
                pe_blocks = action.pe_tokens // self.config.model.block_size
                waited_s = monotonic() - live.since
                path, hits = action.read_path, live.hit_blocks
                self.tracer.span(
                    "queue",
                    action.key[0],
                    live.since,
                    attempt=action.key[1],
                    prefill=prefill.name,
                    decode=decode.name,
                    path=path.value,
                    hit_blocks=hits,
                    pe_blocks=pe_blocks,
                )
                for member in (decode, prefill):
                    self._started[member.incarnation] = number = self._started.get(member.incarnation, 0) + 1
                    msg = Assign(live.request, prefill, decode, path, hits, pe_blocks, waited_s, number)
                    self._assign(action.key, live, member, msg)
            case CancelOn():
                engine = self.registry.get(action.engine)
                if engine is not None:
                    self._notices.make_sure(engine, Cancel(*action.key))
            case Fail():
                live = self._live.pop(action.key)
                frontend = self.registry.get(live.frontend)
                if frontend is not None:
                    self._notices.make_sure(frontend, RequestFailed(*action.key, action.code, action.detail))

    def _assign(self, key: RequestKey, live: _Live, member: Member, msg: Assign) -> None:
        lost = RequestErred(key, member.incarnation, ErrorCode.UNREACHABLE, f"{member.name} was not reached")
        patience_s = self.config.timeouts.call_s
        self._notices.make_sure(
            member, msg, lambda: self._live.get(key) is live, lambda: self._progress(lost), patience_s
        )

    async def drain(self) -> None:
        """Front ends that stay take their requests to the next scheduler, at once: they wait for it. Those that end
        with us finish what they have."""
        heard_by = monotonic() + HEAR_S
        while self._live:
            leaving = all(member.incarnation in self.leaving for member in self.registry.of(Role.FRONTEND))
            if not leaving and monotonic() > heard_by:
                return
            await asyncio.sleep(0.05)

    async def shut(self) -> None:
        self._notices.close()
        if self._recorder is not None:
            self._recorder.close()


def _create(path: str) -> TextIO:
    """A text file, written line by line. ConfigError if that is not possible."""
    try:
        return open(path, "w", buffering=1)
    except OSError as error:
        raise ConfigError(f"scheduler.record {path}: {error.strerror}") from None
