"""Layerwise prefill (services.prefill.layerwise): of a forward only a few layers are in device memory at once.

Two forwards are in hand: while the last layers of one are computed, the first of the next are loaded.
"""

from __future__ import annotations

from collections import deque

from common.blocks.ranges import RangePool
from loadgen.simulator.prefill import Forward, PrefillEngine
from loadgen.simulator.request import Request

#: The next forward is planned so many steps before the end of the one in hand, as live engines do.
STEPS_AHEAD = 2


class Layerwise(PrefillEngine):
    """waiting: ready and not wholly planned, in order of readiness."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.waiting: deque[Request] = deque()
        self.pool = RangePool(self.run.prefill_memory)
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
        run, row_bytes = self.run, self.run.row_bytes
        chunks = self.pack(waiting, run.prefill_memory // (2 * row_bytes))
        free = self.pool.largest_free
        rows = sum([chunk.cached + chunk.new for chunk in chunks])
        while rows * 2 * row_bytes > free:
            chunk = chunks.pop()
            rows -= chunk.cached + chunk.new
        if not chunks:
            return None
        memory = self.pool.take(2 * rows * row_bytes)
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
        run, now = self.run, self.clock.now
        if run.free:
            return
        end, moved = now, 0.0
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            own = min(chunk.cached, request.own_rows) * run.kv_bytes
            pushed = chunk.cached * run.kv_bytes - own
            if own:
                copied = self.copied(own)
                if copied > now:
                    end = max(end, copied)
                    moved += own
            if pushed:
                end = max(end, request.decode.sent_to(self, pushed, now))
                moved += pushed
        forward.load_end = end
        forward.load_s = moved / run.cnic_rate

    def begin(self, forward: Forward, seconds: float) -> None:
        now, steps = self.clock.now, self.run.steps
        step = seconds / steps
        handed, send_s = self._hand_off(forward)
        load, send = forward.load_s / steps, send_s / steps
        opened = max(now, forward.planned_at + load)
        pace = max(step, (load + step + send) / 2, load + send)
        ends = max(opened + step + (steps - 1) * pace, forward.load_end + step)
        forward.drained_at = max(ends + send, handed)
        self.clock.at(ends - (STEPS_AHEAD - 1) * step, self._plan_ahead)
        self.clock.at(ends, self._computed, forward)

    def _hand_off(self, forward: Forward) -> tuple[float, float]:
        """Rows that the decode side lacks, on their way from now on, layer by layer: when the NICs are through with
        them, and for how long our own one is busy. Rows that a later chunk loads again stay in our buffer too."""
        run, now = self.run, self.clock.now
        end, moved = now, 0.0
        if run.free:
            return end, moved
        for request, chunk in zip(forward.requests, forward.chunks, strict=True):
            stop = chunk.cached + chunk.new
            lacking = max(min(request.pe_tokens, stop) - request.sent, 0) + stop - max(request.sent, request.hit)
            request.sent = stop
            num_bytes = lacking * run.kv_bytes
            end = max(end, self.sent_to(request.decode, num_bytes, now))
            moved += num_bytes
            kept = min(stop, request.own_rows) - chunk.cached
            if not chunk.last and kept > 0:
                self.copied(kept * run.kv_bytes)
        return end, moved / run.cnic_rate

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
