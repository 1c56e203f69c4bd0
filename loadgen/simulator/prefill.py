"""What both kinds of prefill engines share: one forward computed at a time, in the rounds of their group.

A forward's times are closed forms. KV of its layers streams in while earlier layers are computed, and out behind them,
through two slots of layers (services.traffic_manager.forward): in every two layers a slot is loaded, computed and sent
on once, so a layer takes the longest of computing it, of half such a turn, and of what its NICs need for it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from common.types import Role
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.forward import Forward
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Engine, Node
from loadgen.simulator.request import Request
from loadgen.simulator.world import World
from services.prefill.batching import Budget, Chunk, pack
from services.scheduler.policy import Load

#: Requests that are offered to the packing of a forward at first.
FEW = 12


class PrefillEngine(Engine):
    """Base of layerwise and resident prefill. attention_s: predicted, of all forwards so far."""

    role = Role.PREFILL
    group: PrefillGroup

    def __init__(self, world: World, name: str, node: Node, group: PrefillGroup) -> None:
        super().__init__(world, name, node, group)
        self.attention_s = 0.0
        self.computed_tokens = 0
        self.idle = True

    def load(self) -> Load:
        return Load(self.name, self.seq, self.tok, self.read_q, self.rate.tokens_per_s, 0, self.started)

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

    def pack(self, requests: Collection[Request], budget: Budget) -> list[Chunk]:
        """The live packing of a forward. Only the first few of many requests fit, so that these are tried first."""
        quota = self.constants.quota
        chunks: list[Chunk] = []
        for tried in (FEW, budget.requests):
            pending = [request.pending for request in islice(requests, tried)]
            chunks = pack(pending, budget, BLOCK_TOKENS, quota)
            if len(chunks) < tried or tried >= len(requests):
                break
        return chunks

    def forward(self, requests: list[Request], chunks: list[Chunk]) -> Forward:
        attention, gpus = self.constants.attention, self.constants.gpus
        times = [attention(chunk.cached, chunk.new) for chunk in chunks]
        total = sum(times)
        self.attention_s += total / gpus
        return Forward(requests, chunks, max(*times, total / gpus), self.clock.now)

    def first_token(self, request: Request) -> None:
        self.computed_tokens += request.prompt - request.hit
        self.control.first_token(request)

    def done(self, request: Request) -> None:
        """All of its rows are delivered: nothing of it remains here."""
        self.left(request)
        self.control.prefill_ended(request)
        handover_s = self.constants.handover_s
        if handover_s and not self.constants.free:
            self.clock.at(self.clock.now + handover_s, self._deliver, request)
        else:
            request.decode.deliver(request)

    def _deliver(self, request: Request) -> None:
        if not request.gone:
            request.decode.deliver(request)
