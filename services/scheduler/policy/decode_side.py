"""Which decode engine a request goes to (spec §7): to a group at once, to an engine of it when memory allows.

Phase 1 puts each request into the queue of the group with the least total tok_e, queued requests included. Phase 2
serves a group's queue when its engines have room, strictly FIFO: a large request at the head is not overtaken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.types import Role
from services.scheduler.policy.events import Load
from services.scheduler.policy.ranking import Ranking
from services.scheduler.policy.state import ArrivalQueue, DecodeEngine, Group, Request, Turns

#: An engine may get so many times an even share of the tokens before the number of its requests stops to decide.
HIGH_TOKENS = 1.05


class DecodeSide:
    """Owns the decode side's queues, and its engines' counters. engines: those that do not drain."""

    role = Role.DECODE

    def __init__(self, turns: Turns) -> None:
        self.engines: dict[str, DecodeEngine] = {}
        self.groups: dict[str, Group] = {}
        self.queue = ArrivalQueue()  # requests that no open group could hold
        self.ranking: Ranking[Group] = Ranking()  # groups with open engines, by total tok
        self._turns = turns
        self.retry: dict[Group, None] = {}  # the head of these groups' queues may find an engine now

    # -- engines --

    def group(self, name: str) -> Group:
        """For an engine that joins it."""
        group = self.groups.setdefault(name, Group(name, next(self._turns)))
        group.members += 1
        return group

    def join(self, engine: DecodeEngine) -> None:
        self.engines[engine.name] = engine

    def report(self, engine: DecodeEngine, load: Load) -> None:
        group, before = engine.group, engine.tok
        engine.report(load.seq, load.tok)
        engine.free_tokens = load.free_device_tokens - engine.pending_tokens
        if engine.open:
            if engine.tok != before:
                group.tok += engine.tok - before
                self._ranked(group)
            self._try(group, engine)
        elif engine.name in self.engines:
            engine.open = True
            is_new = not group.engines
            group.engines.append(engine)
            group.tok += engine.tok
            self._ranked(group)
            self._try(group, engine)
            # a group that opens gets its share of all that waits; an engine may hold what the others could not
            self._give_out_anew(list(self.waiting if is_new else self.queue.values()))

    def close(self, engine: DecodeEngine) -> None:
        """It takes no more work: it drains or has left. Its group's queue is given out anew, and so are those of its
        requests that have not started."""
        self.engines.pop(engine.name, None)
        group = engine.group
        if engine.open:
            engine.open = False
            group.engines.remove(engine)
            group.tok -= engine.tok
            self._ranked(group)
        waiting = [request for request in engine.requests.values() if request.read_path is None]
        self._give_out_anew([*waiting, *group.queue.values()])

    def leave(self, engine: DecodeEngine) -> None:
        engine.group.members -= 1
        if not engine.group.members:
            del self.groups[engine.group.name]

    def _ranked(self, group: Group) -> None:
        """Its engines, their load or its queue have changed."""
        if group.engines:
            self.ranking.place(group, group.tok + group.queue.tokens, group.turn)
        else:
            self.ranking.remove(group)

    def _try(self, group: Group, roomier: DecodeEngine | None = None) -> None:
        """It has got a new head of its queue, or room on an engine."""
        if group.queue:
            self.retry[group] = None
            if roomier is not None:
                group.roomier[roomier] = None

    # -- requests --

    @property
    def waiting(self) -> Iterator[Request]:
        yield from self.queue.values()
        for group in self.groups.values():
            yield from group.queue.values()

    def can_hold(self, request: Request) -> bool:
        """Some engine could take the request if it were idle."""
        return _could_hold(self.engines.values(), request)

    def enqueue(self, request: Request) -> None:
        """Phase 1."""
        group = self.ranking.least()
        if group is not None and not _could_hold(group.engines, request):
            group = self.ranking.least_of(lambda other: _could_hold(other.engines, request))
        request.group = group
        if group is None:
            self.queue.add(request)
            return
        is_head = group.queue.add(request)
        group.turn = next(self._turns)
        self._ranked(group)
        if is_head:
            self._try(group)

    def _give_out_anew(self, requests: list[Request]) -> None:
        for request in requests:
            self.release(request)
        for request in sorted(requests, key=lambda request: request.arrival):
            self.enqueue(request)

    def handed_over(self, request: Request) -> None:
        """Its KV has left the staging buffer for device memory, where the next report counts it as taken."""
        engine = request.decode
        assert engine is not None
        request.handed_over = True
        engine.free_blocks += request.num_blocks
        engine.pending_tokens -= request.num_tokens
        self._try(engine.group, engine)

    def release(self, request: Request) -> None:
        """It has ended here, well or badly, or leaves its queue."""
        engine, group = request.decode, request.group
        request.decode = request.group = None
        if group is None:
            self.queue.remove(request)
            return
        if engine is None:
            _take_out(group, request)
            self._try(group)
        else:
            engine.release(request)
            if engine.open:
                group.tok -= request.num_tokens
            if not request.handed_over:
                engine.free_blocks += request.num_blocks
                engine.pending_tokens -= request.num_tokens
                engine.free_tokens += request.num_tokens
                self._try(engine.group, engine)
        self._ranked(group)

    def assign(self) -> list[Request]:
        """Phase 2: the requests that have got their engines."""
        assigned = []
        while self.retry:
            group, _ = self.retry.popitem()
            queue = group.queue
            limit: float | None = None
            while queue:
                request = queue.head
                engines = with_room(group, request)
                if not engines:
                    group.refused = request
                    break
                if limit is None:
                    limit = high_token_threshold(group)
                engine = choose_engine(engines, request, limit)
                _take_out(group, request)
                request.decode = engine
                engine.take(request)
                engine.turn = next(self._turns)
                engine.free_blocks -= request.num_blocks
                engine.free_tokens -= request.num_tokens
                engine.pending_tokens += request.num_tokens
                group.tok += request.num_tokens  # from the queue: the group's rank is as before
                assigned.append(request)
            group.roomier.clear()
        return assigned


def _could_hold(engines: Iterable[DecodeEngine], request: Request) -> bool:
    for engine in engines:
        if request.num_blocks <= engine.buffer_blocks and request.num_tokens < engine.device_tokens:
            return True
    return False


def _take_out(group: Group, request: Request) -> None:
    """Of its queue."""
    group.queue.remove(request)
    if group.refused is request:
        group.refused = None


def with_room(group: Group, request: Request) -> list[DecodeEngine]:
    """Those that could take it now: mostly none, while requests wait. Of a request that found none, only those need a
    look that have got more room since."""
    blocks, tokens = request.num_blocks, request.num_tokens
    looked_at: Iterable[DecodeEngine] = group.roomier if request is group.refused else group.engines
    return [
        engine for engine in looked_at if blocks <= engine.free_blocks and tokens < engine.free_tokens and engine.open
    ]


def high_token_threshold(group: Group) -> float:
    """Z = 1.05 * (sum tokens(R) + sum tok_e) / |G|, where R are the first requests of the queue that fit the sum of its
    engines' free device memory."""
    free, queued = 0, group.queue.tokens
    for engine in group.engines:
        if engine.free_tokens > 0:
            free += engine.free_tokens
            if free >= queued:
                break  # all of them fit
    return HIGH_TOKENS * (group.queue.fitting(free) + group.tok) / len(group.engines)


def choose_engine(engines: list[DecodeEngine], request: Request, limit: float) -> DecodeEngine:
    """Of these, those that stay within the limit of tokens with it come first, by least seq, then least tok; if there
    are none, the least tok. Between equals the one whose turn is longest ago."""
    most = limit - request.num_tokens
    within = [engine for engine in engines if engine.tok <= most]
    if within:
        least = min([engine.seq for engine in within])
        engines = [engine for engine in within if engine.seq == least]
    if len(engines) == 1:
        return engines[0]
    return min(engines, key=_tok_then_turn)


def _tok_then_turn(engine: DecodeEngine) -> tuple[int, int]:
    return (engine.tok, engine.turn)
