"""Layerwise prefill (paper §4.1): of a forward only a few layers are in device memory at once.

Two forwards are in hand: while the last layers of one are computed, the first of the next are loaded.
"""

from __future__ import annotations

from common.messages import BeginForward
from services.engine.backend import Slots, Steps
from services.prefill.forwards import Forwards, Host, InHand, Run, prefill_sequence
from services.prefill.sequence import Sequence

#: The next forward is planned so many steps before the end of the one in hand: as late as its loads allow, because what
#: becomes ready after that has to wait for the one after.
STEPS_AHEAD = 2


def layerwise_rows(host: Host) -> int:
    """The longest context: a forward needs two layers at once, no more."""
    return host.memory.max_slot_rows(2)


class Layerwise(Forwards):
    """One forward a batch."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._waiting: dict[Sequence, None] = {}  # ready and not done, in order of readiness
        self._ahead: Run | None = None

    def assigned(self, sequence: Sequence) -> None:
        self.host.stage_sequence(sequence)

    def ready(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def dropped(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def next(self) -> Run | None:
        run, self._ahead = self._ahead or self._plan(), None
        return run

    @property
    def planned(self) -> bool:
        return self._ahead is not None

    def computed(self, run: Run) -> None:
        for forward in run.forwards:
            forward.computed = True
            self._end_if_done(forward)

    def _plan(self) -> Run | None:
        row_bytes, num_layers = self.geometry.row_bytes, self.geometry.num_layers
        free = self.pool.largest_free
        sequences = [sequence for sequence in self._waiting if sequence.pending.miss]
        chunks = self.host.pack(sequences, layerwise_rows(self.host))
        # what is not free yet makes a batch smaller, never a chunk: that would move its context once more
        while (rows := sum(chunk.cached + chunk.new for chunk in chunks)) * 2 * row_bytes > free:
            chunks.pop()
        if not chunks:
            return None
        resident = min(self.host.settings.resident_layers, num_layers, free // (rows * row_bytes))
        per_step = max(resident // 2, 1)
        memory = self.pool.take(2 * per_step * rows * row_bytes)
        assert memory is not None, "packed into what is free"
        slots = Slots(memory.start, rows, 2 * per_step)
        batch, row = [], 0
        for sequence, chunk in zip(sequences, chunks, strict=False):
            sequence.planned += chunk.new
            batch.append(prefill_sequence(sequence, chunk, row, slots))
            row += chunk.cached + chunk.new
        steps = Steps(num_layers, per_step, lambda step: self._step_computed(forward, step), self.host.wait_s)
        places = [sequence.place for sequence in batch]
        plan = BeginForward(self._number(), slots.base, rows, slots.count, per_step, places)
        forward = InHand(plan, memory, sequences[: len(batch)], steps, dict(zip(sequences, chunks, strict=False)))
        self._begin(forward)
        return Run([forward], forward.sequences, batch, steps)

    def _step_computed(self, forward: InHand, step: int) -> None:
        super()._step_computed(forward, step)
        if self._ahead is None and step >= forward.num_steps - STEPS_AHEAD:
            self._ahead = self._plan()

    def _loaded(self, forward: InHand, step: int) -> None:
        assert forward.steps is not None
        forward.steps.open(step)
