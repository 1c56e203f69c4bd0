"""Layerwise prefill (services.prefill.layerwise): of a forward only a few layers are in device memory at once.

Two forwards are in hand: while the last layers of one are computed, the first of the next are loaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from common.blocks.ranges import RangePool
from loadgen.simulator.forward import Forward
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Node
from loadgen.simulator.prefill import PrefillEngine
from loadgen.simulator.request import Request
from loadgen.simulator.world import World

#: The next forward is planned so many steps before the end of the one in hand, as live engines do.
STEPS_AHEAD = 2


class Layerwise(PrefillEngine):
    """waiting: ready and not wholly planned, in order of readiness."""

    def __init__(self, world: World, name: str, node: Node, group: PrefillGroup) -> None:
        super().__init__(world, name, node, group)
        constants = world.constants
        self.waiting: deque[Request] = deque()
        self.pool = RangePool(constants.prefill_memory)
        self._row_bytes = 2 * constants.row_bytes  # two layers at once
        self._budget = replace(constants.budget, rows=constants.prefill_memory // self._row_bytes)
        self._ahead: Forward | None = None

    def assigned(self, request: Request) -> None:
        super().assigned(request)
        self.stage(request, request.pe_tokens)

    def ready(self, request: Request) -> None:
        self.waiting.append(request)
        self.wake()

    def drop(self, request: Request) -> None:
        super().drop(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def plan(self) -> Forward | None:
        waiting = self.waiting
        if not waiting:
            return None
        row_bytes = self._row_bytes
        chunks = self.pack(waiting, self._budget)
        free = self.pool.largest_free
        rows = sum([chunk.cached + chunk.new for chunk in chunks])
        while rows * row_bytes > free:
            chunk = chunks.pop()
            rows -= chunk.cached + chunk.new
        if not chunks:
            return None
        memory = self.pool.take(rows * row_bytes)
        assert memory is not None, "packed into what is free"
        requests = [waiting.popleft() for _ in chunks]
        if not chunks[-1].last:  # its next chunk may be planned while this one is in hand
            requests[-1].planned(chunks[-1].new)
            waiting.appendleft(requests[-1])
        forward = self.forward(requests, chunks)
        forward.memory = memory
        self._load(forward)
        return forward

    def _load(self, forward: Forward) -> None:
        """The cached rows: those that were staged here through our own NIC, the others pushed by the decode side."""
        constants, now = self.constants, self.clock.now
        if constants.free:
            return
        kv_bytes = constants.kv_bytes
        end, moved = now, 0.0
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            own = min(chunk.cached, request.own_rows) * kv_bytes
            pushed = chunk.cached * kv_bytes - own
            if own:
                copied = self.copied(own)
                if copied > now:
                    end = max(end, copied)
                    moved += own
            if pushed:
                end = max(end, self.sent_from(request.decode, pushed))
                moved += pushed
        forward.load_end = end
        forward.load_s = moved / constants.cnic_rate

    def begin(self, forward: Forward, seconds: float) -> None:
        now, steps = self.clock.now, self.constants.steps
        step = seconds / steps
        handed, send_s = self._hand_off(forward)
        load, send = forward.load_s / steps, send_s / steps
        opened = max(now, forward.planned_at + self.constants.forward_s + load)
        pace = max(step, (load + step + send) / 2, load + send)
        ends = max(opened + step + (steps - 1) * pace, forward.load_end + step)
        forward.drained_at = max(ends + send, handed)
        self.clock.at(ends - (STEPS_AHEAD - 1) * step, self._plan_ahead)
        self.clock.at(ends, self._computed, forward)

    def _hand_off(self, forward: Forward) -> tuple[float, float]:
        """Rows that the decode side lacks, on their way from now on, layer by layer: when the NICs are through with
        them, and for how long our own one is busy. Rows that a later chunk loads again stay in our buffer too."""
        constants, now = self.constants, self.clock.now
        end, moved = now, 0.0
        if constants.free:
            return end, moved
        kv_bytes = constants.kv_bytes
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            stop = chunk.cached + chunk.new
            lacking = max(min(request.pe_tokens, stop) - request.sent, 0) + stop - max(request.sent, request.hit)
            request.sent = stop
            num_bytes = lacking * kv_bytes
            end = max(end, self.sent_to(request.decode, num_bytes))
            moved += num_bytes
            kept = min(stop, request.own_rows) - chunk.cached
            if not chunk.last and kept > 0:
                self.copied(kept * kv_bytes)
        return end, moved / constants.cnic_rate

    def _plan_ahead(self, _: None) -> None:
        if self._ahead is None and not self.idle and self.alive:
            self._ahead = self.plan()

    def _computed(self, forward: Forward) -> None:
        if not self.alive:
            return
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            if chunk.last and not request.gone:
                self.first_token(request)
        ahead, self._ahead = self._ahead, None
        self.go_on(ahead)
        if forward.drained_at > self.clock.now:
            self.clock.at(forward.drained_at, self._drained, forward)
        else:
            self._drained(forward)

    def _drained(self, forward: Forward) -> None:
        """Its rows are delivered, and its memory is free again."""
        if not self.alive:
            return
        self.pool.give_back(forward.memory)
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            if chunk.last and not request.gone:
                self.done(request)
        self.wake()
