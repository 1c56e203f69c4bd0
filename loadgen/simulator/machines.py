"""Nodes and engines: what they share of a cluster, and how groups report to the scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.perf.links import FairLink, FifoLink, through
from common.types import Role
from loadgen.simulator.clock import Clock, Handler
from loadgen.simulator.request import Request
from services.scheduler.policy import Fetched, Load

if TYPE_CHECKING:
    from typing import Any

    from loadgen.simulator.run import Simulation

#: Weights of what shares a storage NIC inwards: reads of KV, and traffic that is not ours.
OURS, FOREIGN = 0, 1


class Node:
    """A machine with its storage NIC. Reads share it evenly, as the storage gateway serves them in turn; writes leave
    in the order in which they come, and nobody waits for them. Other traffic (FOREIGN) may share it."""

    def __init__(self, name: str, role: Role, clock: Clock, rate: float) -> None:
        self.name = name
        self.role = role
        self.engines: list[Engine] = []
        self.snic_in = FairLink(rate, (1.0, 1.0))
        self.snic_out = FifoLink(rate)
        self._clock = clock
        self._due = math.inf  # of the event that looks after reads

    def read(self, num_bytes: float, handler: Handler, argument: Any, kind: int = OURS) -> None:
        """handler(argument) is called once so many bytes have come in."""
        self.snic_in.start(self._clock.now, num_bytes, (handler, argument), kind)
        self._watch()

    def set_rate(self, rate: float) -> None:
        """Of the storage NIC, inwards and outwards, from now on."""
        self.snic_in.set_rate(self._clock.now, rate)
        self.snic_out.rate = rate
        self._watch()

    def _watch(self) -> None:
        """One event is due no later than the next end; if it is early, it looks again."""
        due = self.snic_in.next_end()
        if due < self._due:
            self._due = due
            self._clock.at(due, self._on_due, due)

    def _on_due(self, due: float) -> None:
        if due != self._due:
            return  # an earlier one has taken its place
        self._due = math.inf
        for handler, argument in self.snic_in.finished(due):
            handler(argument)
        self._watch()


class Engine:
    """What both roles share. tx, rx: of its compute NIC. seq, tok: requests on it and their prompts' tokens; read_q:
    hit tokens that its side is still to read; started: requests ever started on it. slow: by which its computing is
    stretched. persisted: bytes of its own copies to be stored. open: it takes new work; alive: it is there."""

    role: Role

    def __init__(self, run: Simulation, name: str, node: Node, group: Group) -> None:
        self.run = run
        self.clock = run.clock
        self.name = name
        self.node = node
        self.group = group
        self.tx = FifoLink(run.cnic_rate)
        self.rx = FifoLink(run.cnic_rate)
        self.seq = 0
        self.tok = 0
        self.read_q = 0
        self.started = 0
        self.slow = 1.0
        self.open = True
        self.alive = True
        self.requests: dict[Request, None] = {}
        self.persisted = 0.0
        node.engines.append(self)
        group.engines.append(self)

    def load(self) -> Load:
        """What it reports now."""
        raise NotImplementedError

    def assigned(self, request: Request) -> None:
        """A request is started on it."""
        self.started += 1
        self.seq += 1
        self.tok += request.prompt
        self.requests[request] = None

    def left(self, request: Request) -> None:
        """It has ended here."""
        if request in self.requests:
            del self.requests[request]
            self.seq -= 1
            self.tok -= request.prompt

    def drop(self, request: Request) -> None:
        """It has ended elsewhere, badly: let go of what it holds here."""
        self.left(request)

    def die(self) -> None:
        """It computes and says no more; nobody knows yet (Simulation.leave)."""
        self.alive = False

    def set_slow(self, factor: float) -> None:
        """From now on: the next forward or step."""
        self.slow = factor

    def stage(self, request: Request, tokens: int) -> None:
        """Read so many of its hits through this node's storage NIC."""
        if tokens and not self.run.free:
            request.reads += 1
            self.read_q += tokens
            self.node.read(tokens * self.run.kv_bytes, self._read, (request, tokens))

    def _read(self, read: tuple[Request, int]) -> None:
        request, tokens = read
        self.read_q -= tokens
        self.group.changed(self)
        self.run.buffered(request)

    def copied(self, num_bytes: float) -> float:
        """When so many bytes are copied between this engine's staging buffer and its device memory, through its own
        compute NIC."""
        now = self.clock.now
        if self.run.free:
            return now
        if self.run.copies_free:
            self.tx.sent += num_bytes
            self.rx.sent += num_bytes
            return now
        return through(self.tx, self.rx, now, num_bytes)

    def sent_to(self, other: Engine, num_bytes: float, since: float) -> float:
        """When so many bytes have gone to another engine."""
        if self.run.free:
            return since
        return through(self.tx, other.rx, since, num_bytes)


class Group:
    """Engines of one role that are scheduled together: their leader fetches for those whose load has changed, soon
    after the first of them (services.engine.fetching)."""

    def __init__(self, run: Simulation, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.engines: list[Engine] = []
        self._run = run
        self._changed: dict[Engine, None] = {}

    def changed(self, engine: Engine) -> None:
        """Its load is not what it last reported."""
        if not self._changed:
            clock = self._run.clock
            clock.at(clock.now + self._run.overheads.report_s, self._fetch)
        self._changed[engine] = None

    def _fetch(self, _: None) -> None:
        loads = tuple([engine.load() for engine in self._changed if engine.open and engine.alive])
        self._changed.clear()
        if loads:
            self._run.tell(Fetched(loads))
