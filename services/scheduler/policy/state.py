"""What the policy knows: nodes, engines, groups and requests, and what each request holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from common.types import ReadPath, RequestKey, Role

Turns = Iterator[int]
"""Numbers that only grow, one for each choice."""

#: Requests that have left a queue and are not yet forgotten.
_SLACK = 64

ReadSide = Literal["pe_only", "de_only", "round_robin", "shorter_queue", "split"]


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Constants of spec §7, in tokens.

    alpha: a node whose read queue is longer is a second choice for prefill. beta: an engine with more unfinished tokens
    gets no prefill. max_waiting: bound of the waiting queue, in requests. block_size: a split read is cut at a block.
    """

    read_side: ReadSide
    alpha: int
    beta: int
    max_waiting: int
    block_size: int


@dataclass(slots=True, eq=False)
class Node:
    """A machine's storage side. read_q: hit tokens to be read there (its engines' sum); read_total: ever assigned."""

    name: str
    engines: list[Engine] = field(default_factory=list)
    read_q: int = 0
    read_total: int = 0

    @property
    def read_rate(self) -> float:
        """Tokens a second that its engines' sides read together; 0: none of them is known."""
        return sum(engine.read_rate for engine in self.engines)


@dataclass(slots=True, eq=False)
class Engine:
    """A prefill engine, or what a decode engine has in common with it.

    assigned_seq, assigned_tok: requests given to it that have not ended on it, and their prompts' tokens.
    seq, tok: what it last reported of these (with the tokens that it has generated), or at least what is assigned: it
    may not have heard of that yet. Until its next report both follow what is assigned and what ends.
    read_q: hit tokens of its requests that its side is still to read, by its last report and what has been assigned
    since; read_total: ever assigned. read_rate: tokens a second that its side reads, as last known (0: never).
    free_blocks: staging buffer not reserved. turn: when it was last chosen. started: requests ever started on it;
    unheard: of the last ones, each one's number and hit tokens to be read here, until a report knows of them.
    """

    name: str
    role: Role
    node: Node
    buffer_blocks: int
    turn: int
    free_blocks: int
    seq: int = 0
    tok: int = 0
    assigned_seq: int = 0
    assigned_tok: int = 0
    read_q: int = 0
    read_total: int = 0
    read_rate: float = 0.0
    started: int = 0
    unheard: deque[tuple[int, int]] = field(default_factory=deque)
    open: bool = False  # it has fetched, and does not drain
    requests: dict[RequestKey, Request] = field(default_factory=dict)

    def start(self, read_tokens: int) -> None:
        """A request starts on it, of which so many hit tokens are to be read here."""
        self.started += 1
        self.unheard.append((self.started, read_tokens))

    def unheard_tokens(self, heard: int | None) -> int:
        """Hit tokens to be read that a report does not know of which has heard of so many started requests."""
        unheard = self.unheard
        while unheard and (heard is None or unheard[0][0] <= heard):
            unheard.popleft()
        return sum([tokens for _, tokens in unheard]) if unheard else 0

    def report(self, seq: int, tok: int) -> None:
        self.seq = seq if seq > self.assigned_seq else self.assigned_seq
        self.tok = tok if tok > self.assigned_tok else self.assigned_tok

    def take(self, request: Request) -> None:
        self.requests[request.key] = request
        self.assigned_seq += 1
        self.assigned_tok += request.num_tokens
        self.seq += 1
        self.tok += request.num_tokens

    def release(self, request: Request) -> None:
        del self.requests[request.key]
        self.assigned_seq -= 1
        self.assigned_tok -= request.num_tokens
        self.seq -= 1
        self.tok -= request.num_tokens


@dataclass(slots=True, eq=False)
class DecodeEngine(Engine):
    """device_tokens: all of its device memory. pending_tokens: prompts assigned to it and not handed over. free_tokens:
    device memory that it last reported as free, less those prompts (spec §7)."""

    device_tokens: int = 0
    pending_tokens: int = 0
    free_tokens: int = 0
    group: Group = field(kw_only=True)


class ArrivalQueue(dict[int, "Request"]):
    """Requests by their place in the order of arrival, in that order whenever they come. tokens: their prompts' sum."""

    __slots__ = ("_edge", "_first", "_line", "_within", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        # requests in order, some of which have left since: before the first one all have; for fitting(): those before
        # the edge, and their tokens
        self._line: list[Request] = []
        self._first = 0
        self._edge = 0
        self._within = 0

    def add(self, request: Request) -> bool:
        """Takes its old place if it comes back: O(those that have arrived since). Whether it is the head now."""
        arrival = request.arrival
        self.tokens += request.num_tokens
        if not self._line or self._line[-1].arrival < arrival:
            self[arrival] = request
            self._line.append(request)
            return len(self) == 1
        late = []
        for other in reversed(self):
            if other < arrival:
                break
            late.append(other)
        self[arrival] = request
        for other in reversed(late):
            self[other] = self.pop(other)
        self._line_up()
        return self.head is request

    def remove(self, request: Request) -> None:
        del self[request.arrival]
        self.tokens -= request.num_tokens
        line, edge = self._line, self._edge
        if edge and request.arrival <= line[edge - 1].arrival:
            self._within -= request.num_tokens
        if len(line) > 2 * len(self) + _SLACK:
            self._line_up()

    @property
    def head(self) -> Request:
        line, first = self._line, self._first
        while line[first].arrival not in self:
            first += 1
        self._first = first
        return line[first]

    def fitting(self, limit: int) -> int:
        """Tokens of the first requests, as many as have no more than limit in sum. Amortised O(1) where limit and queue
        change little between calls."""
        if self.tokens <= limit:
            return self.tokens
        line, edge, within = self._line, self._edge, self._within
        while within > limit:
            edge -= 1
            request = line[edge]
            if request.arrival in self:
                within -= request.num_tokens
        while edge < len(line):
            request = line[edge]
            if request.arrival in self:
                if within + request.num_tokens > limit:
                    break
                within += request.num_tokens
            edge += 1
        self._edge, self._within = edge, within
        return within

    def _line_up(self) -> None:
        """Anew, without those that have left."""
        self._line = list(self.values())
        self._first = self._edge = self._within = 0


@dataclass(slots=True, eq=False)
class Group:
    """Decode engines that are scheduled together. members: how many have joined; engines: those that are open; tok:
    their sum. queue: requests that wait for one of them. refused: its head, if none of the engines had room for it
    when it was last tried; roomier: those that have got more since."""

    name: str
    turn: int
    members: int = 0
    engines: list[DecodeEngine] = field(default_factory=list)
    tok: int = 0
    queue: ArrivalQueue = field(default_factory=ArrivalQueue)
    refused: Request | None = None
    roomier: dict[DecodeEngine, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """arrival: its place in the order of arrival. prefill: its engine, from assignment until its part there has ended.
    group: the decode group in whose queue, or on whose engine, it is. pe_blocks: staging buffer that it has reserved on
    its prefill engine. read_path: set once it has started."""

    key: RequestKey
    num_tokens: int
    hit_tokens: int
    num_blocks: int
    arrival: int
    prefill: Engine | None = None
    decode: DecodeEngine | None = None
    group: Group | None = None
    read_path: ReadPath | None = None
    pe_blocks: int = 0
    prefill_ended: bool = False
    handed_over: bool = False
