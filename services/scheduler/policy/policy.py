"""The scheduler's decisions as a state machine over events (spec §7, in a simple form).

A request enters both sides' queues on arrival. Each side is served FIFO when one of its engines has fetched; the second
of the two assignments picks the read side and starts the request.

    waiting --PE and DE chosen--> started --KvHandedOver--> handed over --RequestEnded--> gone
       any state --cancelled | erred | engine lost--> gone, and its other engine is told
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.types import ReadPath, RequestKey, Role
from services.scheduler.policy.actions import Action, CancelOn, Fail, Start
from services.scheduler.policy.events import (
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Event,
    Fetched,
    KvHandedOver,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
)
from services.scheduler.policy.read_path import ReadSide, choose_read_path


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """beta: an engine with more unfinished tokens than this gets nothing. max_waiting: bound of the waiting queue."""

    read_side: ReadSide
    beta: int
    max_waiting: int


@dataclass(slots=True)
class _Engine:
    role: Role
    node: str
    buffer_blocks: int
    device_tokens: int
    seq: int = 0
    tok: int = 0
    fetched: bool = False
    draining: bool = False

    def takes(self, role: Role) -> bool:
        """It is of this role and has asked for work."""
        return self.role is role and self.fetched and not self.draining


@dataclass(slots=True)
class _Node:
    """A machine's storage side: hit tokens waiting to be read there, and ever assigned to it."""

    read_q: int = 0
    read_total: int = 0


@dataclass(slots=True)
class _Request:
    num_tokens: int
    hit_tokens: int
    num_blocks: int
    prefill: str | None = None
    decode: str | None = None
    read_path: ReadPath | None = None
    prefill_ended: bool = False
    handed_over: bool = False

    @property
    def started(self) -> bool:
        return self.read_path is not None


@dataclass(slots=True)
class Policy:
    """All scheduling state. handle() is the only way in; it neither waits nor reads a clock."""

    config: PolicyConfig
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _requests: dict[RequestKey, _Request] = field(default_factory=dict)
    _assigned: int = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from one event, in order. now: seconds on any monotonic scale."""
        match event:
            case EngineJoined():
                self._engines[event.engine] = _Engine(event.role, event.node, event.buffer_blocks, event.device_tokens)
                self._nodes.setdefault(event.node, _Node())
            case EngineDraining():
                if event.engine in self._engines:
                    self._engines[event.engine].draining = True
            case EngineLeft():
                return [*self._lose(event.engine), *self._assign()]
            case Fetched():
                self._report(event)
            case RequestArrived():
                return [*self._arrive(event), *self._assign()]
            case PrefillEnded():
                if event.key in self._requests:
                    self._requests[event.key].prefill_ended = True
            case KvHandedOver():
                if event.key in self._requests:
                    self._requests[event.key].handed_over = True
            case RequestEnded():
                self._requests.pop(event.key, None)
            case RequestErred():
                return [*self._err(event), *self._assign()]
            case RequestCancelled():
                return [*self._drop(event.key, None), *self._assign()]
        return list(self._assign())

    @property
    def num_waiting(self) -> int:
        return sum(not request.started for request in self._requests.values())

    @property
    def num_running(self) -> int:
        return sum(request.started for request in self._requests.values())

    # -- events --

    def _report(self, event: Fetched) -> None:
        engine = self._engines.get(event.engine)
        if engine is not None:
            engine.seq, engine.tok, engine.fetched = event.seq, event.tok, True
            engine.device_tokens = event.free_device_tokens
            self._nodes[engine.node].read_q = event.read_q

    def _arrive(self, event: RequestArrived) -> Iterator[Action]:
        for role in (Role.PREFILL, Role.DECODE):
            if not any(engine.role is role and not engine.draining for engine in self._engines.values()):
                yield Fail(event.key, ErrorCode.NO_ENGINES, f"no live {role.value} engine")
                return
        if self.num_waiting >= self.config.max_waiting:
            yield Fail(event.key, ErrorCode.OVERLOADED, f"{self.config.max_waiting} requests are waiting already")
            return
        self._requests[event.key] = _Request(event.num_tokens, event.hit_tokens, event.num_blocks)

    def _err(self, event: RequestErred) -> Iterator[Action]:
        if event.key in self._requests:
            yield from self._drop(event.key, event.engine)
            yield Fail(event.key, event.code, event.detail)

    def _lose(self, lost: str) -> Iterator[Action]:
        if self._engines.pop(lost, None) is None:
            return
        for key, request in list(self._requests.items()):
            if lost == request.decode or (lost == request.prefill and not request.prefill_ended):
                if request.started:
                    yield from self._drop(key, lost)
                    yield Fail(key, ErrorCode.ENGINE_LOST, f"engine {lost} is gone")
                elif lost == request.decode:
                    request.decode = None
                else:
                    request.prefill = None

    def _drop(self, key: RequestKey, already_told: str | None) -> Iterator[Action]:
        request = self._requests.pop(key, None)
        if request is None or not request.started:
            return
        for engine in (request.prefill, request.decode):
            if engine is not None and engine != already_told and engine in self._engines:
                yield CancelOn(key, engine)

    # -- assignment --

    def _assign(self) -> Iterator[Action]:
        waiting = [(key, request) for key, request in self._requests.items() if not request.started]
        self._assign_prefill([request for _, request in waiting if request.prefill is None])
        self._assign_decode([request for _, request in waiting if request.decode is None])
        for key, request in waiting:
            if request.prefill is not None and request.decode is not None:
                yield self._start(key, request, request.prefill, request.decode)

    def _assign_prefill(self, queue: list[_Request]) -> None:
        """Strictly FIFO; the engine with the fewest unfinished tokens among those under beta.

        Where every read is on this side it also needs staging buffer; else the read goes to the other side if it lacks.
        """
        for request in queue:
            candidates = [
                (engine.tok, name)
                for name, engine in self._engines.items()
                if engine.takes(Role.PREFILL)
                and engine.tok <= self.config.beta
                and (self.config.read_side != "pe_only" or self._can_stage(name, request))
            ]
            if not candidates:
                return
            request.prefill = min(candidates)[1]
            self._take(request.prefill, request)

    def _assign_decode(self, queue: list[_Request]) -> None:
        """FIFO; the engine with the fewest sequences among those with staging buffer and device memory for it.

        Between equals, the node that has been assigned the fewest reads: idle nodes take turns.
        """
        for request in queue:
            candidates = [
                (engine.seq, engine.tok, self._nodes[engine.node].read_total, name)
                for name, engine in self._engines.items()
                if engine.takes(Role.DECODE) and self._fits(name, request)
            ]
            if not candidates:
                return
            request.decode = min(candidates)[-1]
            self._take(request.decode, request)

    def _fits(self, name: str, request: _Request) -> bool:
        """Free device memory = reported free minus prompts assigned but not handed over; likewise the buffer."""
        engine = self._engines[name]
        pending = [other for other in self._requests.values() if other.decode == name and not other.handed_over]
        blocks = sum(other.num_blocks for other in pending)
        tokens = sum(other.num_tokens for other in pending)
        return (
            blocks + request.num_blocks <= engine.buffer_blocks and tokens + request.num_tokens < engine.device_tokens
        )

    def _can_stage(self, name: str, request: _Request) -> bool:
        """A prefill engine has staging buffer for one more request that is read on its side (spec §4)."""
        blocks = sum(
            other.num_blocks
            for other in self._requests.values()
            if other.prefill == name and other is not request and not other.prefill_ended and self._reads_pe(other)
        )
        return blocks + request.num_blocks <= self._engines[name].buffer_blocks

    def _reads_pe(self, request: _Request) -> bool:
        """It is, or will be, read on the prefill side."""
        return self.config.read_side == "pe_only" or request.read_path is ReadPath.PE

    def _take(self, name: str, request: _Request) -> None:
        engine = self._engines[name]
        engine.seq += 1
        engine.tok += request.num_tokens

    def _start(self, key: RequestKey, request: _Request, prefill: str, decode: str) -> Start:
        pe_node, de_node = self._nodes[self._engines[prefill].node], self._nodes[self._engines[decode].node]
        path = choose_read_path(
            self.config.read_side,
            pe_node.read_q,
            de_node.read_q,
            pe_node.read_total,
            de_node.read_total,
            self._assigned,
        )
        if path is ReadPath.PE and not self._can_stage(prefill, request):
            path = ReadPath.DE
        reader = pe_node if path is ReadPath.PE else de_node
        reader.read_q += request.hit_tokens
        reader.read_total += request.hit_tokens
        request.read_path = path
        self._assigned += 1
        return Start(key, prefill, decode, path)
