"""What both kinds of prefill engines share: one forward computed at a time, in the rounds of their group.

A forward's times are closed forms. KV of its layers streams in while earlier layers are computed, and out behind them,
through two slots of layers (services.traffic_manager.forward): in every two layers a slot is loaded, computed and sent
on once, so a layer takes the longest of computing it, of half such a turn, and of what its NICs need for it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

from common.blocks.ranges import Range
from common.types import Role
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Engine
from services.prefill.batching import Budget, Chunk, pack
from services.scheduler.policy import Load

if TYPE_CHECKING:
    from loadgen.simulator.request import Request


#: Requests that are offered to the packing of a forward at first.
FEW = 12


class Forward:
    """One forward of one engine. attention_s: of this engine; tokens: new ones. memory: what it takes of device memory.
    planned_at: when its loads began; load_s: how long the NIC that they come in by is busy with them; load_end: when
    they are through. drained_at: when its rows are delivered."""

    __slots__ = (
        "attention_s",
        "chunks",
        "drained_at",
        "load_end",
        "load_s",
        "memory",
        "planned_at",
        "requests",
        "tokens",
    )

    memory: Range

    def __init__(self, requests: list[Request], chunks: list[Chunk], attention_s: float, planned_at: float) -> None:
        self.requests = requests
        self.chunks = chunks
        self.attention_s = attention_s
        self.tokens = sum([chunk.new for chunk in chunks])
        self.planned_at = planned_at
        self.load_s = 0.0
        self.load_end = planned_at
        self.drained_at = 0.0


class PrefillEngine(Engine):
    """Base of layerwise and resident prefill. attention_s: predicted, of all forwards so far."""

    role = Role.PREFILL
    group: PrefillGroup

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.attention_s = 0.0
        self.computed_tokens = 0
        self.idle = True

    def load(self) -> Load:
        return Load(self.name, self.seq, self.tok, self.read_q, 0.0, 0, self.started)

    def ready(self, request: Request) -> None:
        """Its KV is staged on both sides."""
        raise NotImplementedError

    def begin(self, forward: Forward, seconds: float) -> None:
        """Its round begins, and takes so long if nothing holds it up."""
        raise NotImplementedError

    def plan(self) -> Forward | None:
        """The next forward, FIFO, of what is ready."""
        raise NotImplementedError

    # -- for both kinds --

    def wake(self) -> None:
        """There may be something to compute."""
        if self.idle and self.alive:
            forward = self.plan()
            if forward is not None:
                self.idle = False
                self.group.meet(self, forward)

    def go_on(self, forward: Forward | None) -> None:
        """The forward in hand is computed; this is the next one, if there is one by now."""
        self.group.part(self)
        if forward is None:
            forward = self.plan()
        if forward is None or not self.alive:
            self.idle = True
        else:
            self.group.meet(self, forward)

    def pack(self, requests: Collection[Request], rows: int) -> list[Chunk]:
        """The live packing of a forward. Only the first few of many requests fit, so that these are tried first."""
        run = self.run
        budget = Budget(run.max_batch_tokens, rows, run.max_batch_requests)
        chunks: list[Chunk] = []
        for tried in (FEW, run.max_batch_requests):
            pending = [request.pending for request in islice(requests, tried)]
            chunks = pack(pending, budget, run.block_size, run.quota)
            if len(chunks) < tried or tried >= len(requests):
                break
        return chunks

    def forward(self, requests: list[Request], chunks: list[Chunk]) -> Forward:
        attention = self.run.attention
        times = [attention(chunk.cached, chunk.new) for chunk in chunks]
        gpus = self.run.gpus
        total = sum(times)
        self.attention_s += total / gpus
        return Forward(requests, chunks, max(*times, total / gpus), self.clock.now)

    def first_token(self, request: Request) -> None:
        self.computed_tokens += request.prompt - request.hit
        self.run.first_token(request)

    def done(self, request: Request) -> None:
        """All of its rows are delivered: nothing of it remains here."""
        self.left(request)
        self.run.prefill_ended(request)
        handover_s = self.run.overheads.handover_s
        if handover_s and not self.run.free:
            self.clock.at(self.clock.now + handover_s, self._deliver, request)
        else:
            request.decode.deliver(request)

    def _deliver(self, request: Request) -> None:
        if not request.gone:
            request.decode.deliver(request)
