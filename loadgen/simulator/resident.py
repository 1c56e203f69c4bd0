"""Prefill without layerwise residency: the Basic system (services.prefill.resident).

A request is admitted, in order, once device memory holds the KV of all layers of its whole prompt; only then does its
read start. Its hits are loaded as a whole, its chunks computed when it is its turn, and all of its rows sent on in one
transfer; until that is delivered it keeps the memory.
"""

from __future__ import annotations

from collections import deque

from common.blocks.ranges import Range, RangePool
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.forward import Forward
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Node
from loadgen.simulator.prefill import PrefillEngine
from loadgen.simulator.request import Request
from loadgen.simulator.tier import Tier
from loadgen.simulator.world import World


class Resident(PrefillEngine):
    """loaded: what can be computed, in the order in which it came to be."""

    def __init__(self, world: World, name: str, node: Node, group: PrefillGroup) -> None:
        super().__init__(world, name, node, group)
        self.pool = RangePool(world.constants.prefill_memory)
        self._admission: deque[Request] = deque()
        self._memory: dict[Request, Range] = {}
        self._loaded: dict[Request, None] = {}
        self._in_hand: Forward | None = None
        self.tier = Tier(world.constants.tier_blocks)

    def assigned(self, request: Request) -> None:
        super().assigned(request)
        request.reads += 1  # until it is admitted
        self._admission.append(request)
        self._admit()

    def _admit(self) -> None:
        while self._admission:
            request = self._admission[0]
            if not request.gone:
                memory = self.pool.take(request.prompt * self.constants.kv_bytes)
                if memory is None:
                    return
                self._memory[request] = memory
                request.staged_at = self.clock.now
                found = self.tier.acquire(request.player.name, request.hit // BLOCK_TOKENS)
                self.stage(request, request.pe_tokens - found * BLOCK_TOKENS)
                self.control.buffered(request)
            self._admission.popleft()

    def ready(self, request: Request) -> None:
        """Its hits into device memory."""
        end = self.copied(request.hit * self.constants.kv_bytes)
        if end > self.clock.now:
            self.clock.at(end, self._load, request)
        else:
            self._load(request)

    def _load(self, request: Request) -> None:
        if request.gone:
            self._leave(request)
        elif self.alive:
            self._loaded[request] = None
            self.wake()

    def plan(self) -> Forward | None:
        waiting = list(self._loaded)
        chunks = self.pack(waiting, self.constants.budget)
        if not chunks:
            return None
        if not chunks[-1].last:
            waiting[len(chunks) - 1].planned(chunks[-1].new)
        return self.forward(waiting[: len(chunks)], chunks)

    def begin(self, forward: Forward, seconds: float) -> None:
        self._in_hand = forward
        self.clock.at(self.clock.now + seconds, self._computed, forward)

    def _computed(self, forward: Forward) -> None:
        if not self.alive:
            return
        self._in_hand = None
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            if request.gone:
                self._loaded.pop(request, None)
                self._leave(request)
            elif chunk.last:
                del self._loaded[request]
                self.first_token(request)
                self._hand_off(request)
        self.go_on(None)

    def _hand_off(self, request: Request) -> None:
        now = self.clock.now
        end = self.sent_to(request.decode, request.prompt * self.constants.kv_bytes)
        if end > now:
            self.clock.at(end, self._drained, request)
        else:
            self._drained(request)

    def _drained(self, request: Request) -> None:
        if not self.alive:
            return
        if not request.gone:
            self.done(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Its memory is quiet."""
        memory = self._memory.pop(request, None)
        if memory is not None:
            self.pool.give_back(memory)
            self.tier.release(request.player.name, request.hit // BLOCK_TOKENS if request.ready_at >= 0 else 0)
            self._admit()

    def drop(self, request: Request) -> None:
        super().drop(request)
        busy = self._in_hand is not None and request in self._in_hand.requests
        if request not in self._memory:
            self._admit()  # what is behind it may fit
        elif request.ready_at < 0 or (request in self._loaded and not busy):
            self._loaded.pop(request, None)
            self._leave(request)
        # else what touches its memory ends first: its load, its forward, its transfer
