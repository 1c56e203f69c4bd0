"""Nodes and engines: what they share of a cluster, and how groups report to the scheduler."""

from __future__ import annotations

import math
from typing import Any

from common.perf.links import FairLink, FifoLink, through
from common.perf.read_rate import ReadRate
from common.types import Role
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.clock import Clock, Handler
from loadgen.simulator.request import DecodeSide, Request
from loadgen.simulator.world import World
from services.scheduler.policy import Load

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
    hit tokens that its side is still to read, rate: how fast it does; started: requests ever started on it. slow: by
    which its computing is stretched. persisted: bytes of its own copies to be stored. open: it takes new work; alive:
    it is there."""

    role: Role

    def __init__(self, world: World, name: str, node: Node, group: Group) -> None:
        self.clock = world.clock
        self.constants = world.constants
        self.control = world.control
        self.name = name
        self.node = node
        self.group = group
        self.tx = FifoLink(world.constants.cnic_rate)
        self.rx = FifoLink(world.constants.cnic_rate)
        self.seq = 0
        self.tok = 0
        self.read_q = 0
        self.rate = ReadRate()
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
        constants = self.constants
        if tokens and not constants.free:
            request.reads += 1
            self.read_q += tokens
            if constants.rates:
                self.rate.begin(self.clock.now)
            self.node.read(tokens * constants.kv_bytes, self._read, (request, tokens))

    def _read(self, read: tuple[Request, int]) -> None:
        request, tokens = read
        self.read_q -= tokens
        if self.constants.rates:
            self.rate.end(tokens, self.clock.now)
        self.group.changed(self)
        self.control.buffered(request)

    def store(self, blocks: int) -> None:
        """New full blocks go to storage. Nobody waits for them."""
        constants = self.constants
        if blocks and not constants.free:
            self.node.snic_out.send(self.clock.now, blocks * BLOCK_TOKENS * constants.kv_bytes)

    def copied(self, num_bytes: float) -> float:
        """When so many bytes are copied between this engine's staging buffer and its device memory, through its own
        compute NIC."""
        now, constants = self.clock.now, self.constants
        if not constants.copies_free:
            return through(self.tx, self.rx, now, num_bytes)
        if not constants.free:
            self.tx.sent += num_bytes
            self.rx.sent += num_bytes
        return now

    def sent_to(self, other: DecodeSide, num_bytes: float) -> float:
        """When so many bytes, from now on, have gone to another engine."""
        if self.constants.free:
            return self.clock.now
        return through(self.tx, other.rx, self.clock.now, num_bytes)

    def sent_from(self, other: DecodeSide, num_bytes: float) -> float:
        """When so many bytes, from now on, have come from another engine."""
        if self.constants.free:
            return self.clock.now
        return through(other.tx, self.rx, self.clock.now, num_bytes)


class Group:
    """Engines of one role that are scheduled together: their leader fetches for those whose load has changed, soon
    after the first of them (services.engine.fetching)."""

    def __init__(self, world: World, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.engines: list[Engine] = []
        self._clock = world.clock
        self._control = world.control
        self._report_s = world.constants.report_s
        self._changed: dict[Engine, None] = {}

    def changed(self, engine: Engine) -> None:
        """Its load is not what it last reported."""
        if not self._changed:
            self._clock.at(self._clock.now + self._report_s, self._fetch)
        self._changed[engine] = None

    def _fetch(self, _: None) -> None:
        loads = tuple([engine.load() for engine in self._changed if engine.open and engine.alive])
        self._changed.clear()
        if loads:
            self._control.fetched(loads)
