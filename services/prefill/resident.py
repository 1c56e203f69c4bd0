"""Prefill without layerwise residency: the Basic system (spec §9), to compare with.

A request is admitted, in order, once device memory holds the KV of all layers of its whole prompt; only then does its
read start. Its hits are loaded as a whole, its chunks computed when it is its turn, and all of its rows sent on in one
transfer; until that is delivered it keeps the memory. Several requests are resident at a time: some load or leave while
others are computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.blocks.ranges import Range
from common.messages import BeginForward, SequenceSlice
from services.engine.backend import Slots, Steps
from services.prefill.forwards import Forwards, Host, InHand, Run, prefill_sequence
from services.prefill.sequence import Sequence


def resident_rows(host: Host) -> int:
    """The longest context: all of its layers."""
    return host.memory.max_slot_rows(host.geometry.num_layers)


@dataclass(slots=True, eq=False)
class _Resident:
    """A request in device memory. forward: set once it is begun. loaded: it can be computed; computing: it is being."""

    memory: Range
    forward: InHand | None = None
    loaded: bool = False
    computing: bool = False


class Resident(Forwards):
    """One forward a request, whose only step is all layers."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._admission: deque[Sequence] = deque()
        self._resident: dict[Sequence, _Resident] = {}  # in order of admission
        self._loaded_order: dict[Sequence, None] = {}

    def assigned(self, sequence: Sequence) -> None:
        self._admission.append(sequence)
        self._admit()

    def ready(self, sequence: Sequence) -> None:
        resident = self._resident[sequence]
        number, rows, layers = self._number(), sequence.num_tokens, self.geometry.num_layers
        place = SequenceSlice(*sequence.key, 0, sequence.cached, rows - sequence.cached, True)
        plan = BeginForward(number, resident.memory.start, rows, layers, layers, [place])
        resident.forward = InHand(plan, resident.memory, [sequence])
        self._begin(resident.forward)

    def dropped(self, sequence: Sequence) -> None:
        resident = self._resident.get(sequence)
        if resident is None:  # waiting for admission, where it is passed over; or gone already
            self._admit()  # what is behind it may fit
            return
        self._loaded_order.pop(sequence, None)
        if resident.forward is None:  # nothing can touch its memory before it is begun
            del self._resident[sequence]
            self.pool.give_back(resident.memory)
            self._admit()
        elif resident.loaded and not resident.computing:
            self._leave(resident.forward)

    def next(self) -> Run | None:
        sequences = list(self._loaded_order)
        chunks = self.host.pack(sequences, self.host.memory.max_slot_rows(1))
        if not chunks:
            return None
        batch, forwards = [], []
        for sequence, chunk in zip(sequences, chunks, strict=False):
            sequence.planned += chunk.new
            resident = self._resident[sequence]
            assert resident.forward is not None, "loaded"
            resident.computing = True
            resident.forward.chunks[sequence] = chunk
            forwards.append(resident.forward)
            slots = Slots(resident.memory.start, sequence.num_tokens, self.geometry.num_layers)
            batch.append(prefill_sequence(sequence, chunk, 0, slots))
        steps = Steps(self.geometry.num_layers, self.geometry.num_layers, lambda step: None, self.host.wait_s)
        steps.open(0)
        return Run(forwards, sequences[: len(batch)], batch, steps)

    @property
    def planned(self) -> bool:
        return any(sequence.pending.miss for sequence in self._loaded_order)

    def computed(self, run: Run) -> None:
        for sequence in run.sequences:
            resident = self._resident[sequence]
            assert resident.forward is not None, "computed"
            resident.computing = False
            if not sequence.pending.miss or sequence.dropped:
                self._loaded_order.pop(sequence, None)
                self._leave(resident.forward)  # else its rows stay where they are

    def _leave(self, forward: InHand) -> None:
        forward.computed = True
        self._step_computed(forward, 0)

    def _admit(self) -> None:
        while self._admission:
            sequence = self._admission[0]
            if not sequence.dropped:
                memory = self.pool.take(sequence.num_tokens * self.geometry.bytes_per_token)
                if memory is None:
                    return
                self._resident[sequence] = _Resident(memory)
                self.host.stage_sequence(sequence)
            self._admission.popleft()

    def _loaded(self, forward: InHand, step: int) -> None:
        (sequence,) = forward.sequences
        resident = self._resident[sequence]
        resident.loaded = True
        if sequence.dropped or sequence.key in forward.failed:  # one that failed is lost when this is drained
            self._leave(forward)
        else:
            self._loaded_order[sequence] = None
            self.host.wake()

    def _forget(self, forward: InHand) -> None:
        del self._resident[forward.sequences[0]]

    def _freed(self) -> None:
        self._admit()
