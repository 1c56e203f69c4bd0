"""The scheduler's decisions as a state machine over events (spec §7).

A request enters both sides' queues on arrival. The second of its two assignments picks the read side and starts it.

    waiting --PE and DE chosen--> started --KvHandedOver--> handed over --RequestEnded--> gone
       any state --cancelled | erred | engine lost--> gone, and its other engine is told

Engines learn of a request when it starts. If one goes before that, the request merely waits again, in its old place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from common.errors import ErrorCode
from common.types import RequestKey, Role
from services.scheduler.policy.actions import Action, CancelOn, Fail, Start
from services.scheduler.policy.decode_side import DecodeSide
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
from services.scheduler.policy.prefill_side import PrefillSide
from services.scheduler.policy.read_side import choose_read
from services.scheduler.policy.state import DecodeEngine, Engine, Node, PolicyConfig, Request

Actions = list[Action]


class Policy:
    """All scheduling state. handle() is the only way in; it neither waits nor reads a clock."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._turns = count()
        self._arrivals = count()
        self.prefill = PrefillSide(config, self._turns)
        self.decode = DecodeSide(self._turns)
        self._sides: tuple[PrefillSide, DecodeSide] = (self.prefill, self.decode)
        self.engines: dict[str, Engine] = {}
        self.nodes: dict[str, Node] = {}
        self.requests: dict[RequestKey, Request] = {}
        self.num_waiting = 0
        self._num_started = 0
        self._handlers: dict[type[Any], Callable[[Any, Actions], None]] = {
            EngineJoined: self._join,
            EngineDraining: self._drain,
            EngineLeft: self._leave,
            Fetched: self._fetched,
            RequestArrived: self._arrive,
            PrefillEnded: self._prefill_ended,
            KvHandedOver: self._handed_over,
            RequestEnded: self._ended,
            RequestErred: self._err,
            RequestCancelled: self._cancel,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from one event, in order. now: seconds on any monotonic scale."""
        actions: Actions = []
        self._handlers[type(event)](event, actions)
        prefill, decode = self.prefill, self.decode
        while prefill.retry and prefill.queue:
            request = prefill.assign()
            if request is not None and request.decode is not None:
                self._start(request, actions)
        if decode.retry:
            for request in decode.assign():
                if request.prefill is not None:
                    self._start(request, actions)
        return actions

    @property
    def num_running(self) -> int:
        return len(self.requests) - self.num_waiting

    # -- engines --

    def _join(self, event: EngineJoined, actions: Actions) -> None:
        if event.engine in self.engines:
            return  # repeated
        node = self.nodes.setdefault(event.node, Node(event.node))
        common = (event.engine, event.role, node, event.buffer_blocks, next(self._turns), event.buffer_blocks)
        engine: Engine
        if event.role is Role.PREFILL:
            engine = Engine(*common)
            self.prefill.join(engine)
        else:
            group = self.decode.group(event.group)
            engine = DecodeEngine(*common, device_tokens=event.device_tokens, group=group)
            self.decode.join(engine)
        node.engines.append(engine)
        self.engines[event.engine] = engine

    def _fetched(self, event: Fetched, actions: Actions) -> None:
        for load in event.loads:
            engine = self.engines.get(load.engine)
            if engine is None:
                continue
            engine.read_rate = load.read_rate or engine.read_rate
            read_q = load.read_q + engine.unheard_tokens(load.heard)
            if read_q != engine.read_q:
                self.prefill.count_read(engine, read_q - engine.read_q)
            if isinstance(engine, DecodeEngine):
                self.decode.report(engine, load)
            else:
                self.prefill.report(engine, load)

    def _drain(self, event: EngineDraining, actions: Actions) -> None:
        engine = self.engines.get(event.engine)
        if engine is not None:
            self._close(engine, actions)

    def _leave(self, event: EngineLeft, actions: Actions) -> None:
        engine = self.engines.pop(event.engine, None)
        if engine is None:
            return
        self.prefill.count_read(engine, -engine.read_q)
        engine.node.engines.remove(engine)
        if not engine.node.engines:
            del self.nodes[engine.node.name]
        self._close(engine, actions)
        if isinstance(engine, DecodeEngine):
            self.decode.leave(engine)
        for request in list(engine.requests.values()):
            self._fail(request, ErrorCode.ENGINE_LOST, f"engine {engine.name} is gone", engine.name, actions)

    def _close(self, engine: Engine, actions: Actions) -> None:
        """No more work for this engine. What waited for it waits again, unless nobody is left who could hold it."""
        side: PrefillSide | DecodeSide
        if isinstance(engine, DecodeEngine):
            side = self.decode
            side.close(engine)
        else:
            side = self.prefill
            side.close(engine)
        if side.engines:  # else one may come back
            for request in [request for request in side.waiting if not side.can_hold(request)]:
                self._fail(request, ErrorCode.NO_ENGINES, _too_long(request, engine.role), "", actions)

    # -- requests --

    def _arrive(self, event: RequestArrived, actions: Actions) -> None:
        if event.key in self.requests:
            return  # repeated
        request = Request(event.key, event.num_tokens, event.hit_tokens, event.num_blocks, next(self._arrivals))
        for side in self._sides:
            if not side.can_hold(request):
                detail = _too_long(request, side.role) if side.engines else f"no live {side.role.value} engine"
                actions.append(Fail(event.key, ErrorCode.NO_ENGINES, detail))
                return
        if self.num_waiting >= self.config.max_waiting:
            detail = f"{self.config.max_waiting} requests are waiting already"
            actions.append(Fail(event.key, ErrorCode.OVERLOADED, detail))
            return
        self.requests[event.key] = request
        self.num_waiting += 1
        self.prefill.enqueue(request)
        self.decode.enqueue(request)

    def _start(self, request: Request, actions: Actions) -> None:
        pe, de = request.prefill, request.decode
        assert pe is not None and de is not None
        config = self.config
        read = choose_read(config.read_side, request, pe, de, self._num_started, config.block_size)
        if read.pe_blocks:
            self.prefill.reserve(request, read.pe_blocks)
        for engine, tokens in ((pe, read.pe_tokens), (de, request.hit_tokens - read.pe_tokens)):
            engine.start(tokens)
            if tokens:
                engine.read_total += tokens
                engine.node.read_total += tokens
                self.prefill.count_read(engine, tokens)
        request.read_path = read.path
        self._num_started += 1
        self.num_waiting -= 1
        actions.append(Start(request.key, pe.name, de.name, read.path, read.pe_tokens))

    def _prefill_ended(self, event: PrefillEnded, actions: Actions) -> None:
        request = self.requests.get(event.key)
        if request is not None and request.read_path is not None:
            request.prefill_ended = True
            self.prefill.release(request)

    def _handed_over(self, event: KvHandedOver, actions: Actions) -> None:
        request = self.requests.get(event.key)
        if request is not None and request.read_path is not None and not request.handed_over:
            self.decode.handed_over(request)

    def _ended(self, event: RequestEnded, actions: Actions) -> None:
        request = self.requests.get(event.key)
        if request is not None:
            self._forget(request)

    def _cancel(self, event: RequestCancelled, actions: Actions) -> None:
        request = self.requests.get(event.key)
        if request is not None:
            self._cancel_on_engines(request, "", actions)
            self._forget(request)

    def _err(self, event: RequestErred, actions: Actions) -> None:
        request = self.requests.get(event.key)
        if request is not None:
            self._fail(request, event.code, event.detail, event.engine, actions)

    def _fail(self, request: Request, code: ErrorCode, detail: str, engine: str, actions: Actions) -> None:
        """engine: the one that knows already."""
        self._cancel_on_engines(request, engine, actions)
        self._forget(request)
        actions.append(Fail(request.key, code, detail))

    @staticmethod
    def _cancel_on_engines(request: Request, knows: str, actions: Actions) -> None:
        if request.read_path is not None:
            for engine in (request.prefill, request.decode):
                if engine is not None and engine.name != knows:
                    actions.append(CancelOn(request.key, engine.name))

    def _forget(self, request: Request) -> None:
        del self.requests[request.key]
        self.num_waiting -= request.read_path is None
        self.prefill.release(request)
        self.decode.release(request)


def _too_long(request: Request, role: Role) -> str:
    return f"no live {role.value} engine can hold a prompt of {request.num_tokens} tokens"
