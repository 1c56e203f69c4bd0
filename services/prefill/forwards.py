"""Forwards in hand at the traffic manager, and where their KV lies in device memory: what both ways of prefill share.

A forward is begun (its device memory is taken) -> loaded, step by step -> computed -> drained (its rows are delivered,
and the memory is free again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from common.blocks.geometry import BlockGeometry
from common.blocks.ranges import Range, RangePool
from common.clock import monotonic
from common.config import PrefillConfig
from common.messages import BeginForward, ForwardDrained, LayersComputed, LayersLoaded, SequenceSlice
from common.types import RequestKey
from services.engine.backend import PrefillSequence, Slots, Steps
from services.engine.memory import DeviceMemory
from services.prefill.batching import Chunk
from services.prefill.sequence import Sequence


@dataclass(slots=True, eq=False)
class InHand:
    """A forward that the traffic manager has begun. chunks: the last planned of each request. failed: requests of it
    whose rows did not come, or not arrive. due: once its steps are computed, when it is drained at the latest.
    computed: its first tokens are out; drained: its rows are.
    """

    plan: BeginForward
    memory: Range
    sequences: list[Sequence]
    steps: Steps | None = None
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    failed: set[RequestKey] = field(default_factory=set)
    due: float = math.inf
    computed: bool = False
    drained: bool = False

    @property
    def num_steps(self) -> int:
        return len(self.steps) if self.steps is not None else 1


@dataclass(frozen=True, slots=True)
class Run:
    """One forward for the back end. sequences[i] is what batch[i] is computed of; forwards: at the traffic manager."""

    forwards: list[InHand]
    sequences: list[Sequence]
    batch: list[PrefillSequence]
    steps: Steps

    @property
    def failed(self) -> set[RequestKey]:
        """Requests of it whose rows did not come: what is computed of them is void."""
        return {key for forward in self.forwards for key in forward.failed}


class Host(Protocol):
    """What the forwards need of their engine. wait_s: how long a layer, and likewise the end of a forward, is waited
    for."""

    geometry: BlockGeometry
    memory: DeviceMemory

    @property
    def settings(self) -> PrefillConfig: ...

    @property
    def wait_s(self) -> float: ...

    def tell(self, msg: object) -> None:
        """One-way to the traffic manager."""

    def wake(self) -> None:
        """There may be something to compute."""

    def stage_sequence(self, sequence: Sequence) -> None:
        """Let the traffic manager reserve its buffer and read its hits."""

    def pack(self, sequences: list[Sequence], rows: int) -> list[Chunk]:
        """The next forward of these, FIFO, in so many rows of a layer slot."""

    def delivered(self, sequence: Sequence) -> None:
        """All of its rows are."""

    def lost(self, sequence: Sequence) -> None:
        """Its KV did not come, or did not arrive."""


class Forwards:
    """Base of layerwise and resident prefill."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.geometry = host.geometry
        self.pool = RangePool(host.memory.budget)
        self.in_hand: dict[int, InHand] = {}
        self._last = 0

    # -- what the engine calls --

    def assigned(self, sequence: Sequence) -> None:
        """A new request."""
        raise NotImplementedError

    def ready(self, sequence: Sequence) -> None:
        """Its KV is staged on both sides."""
        raise NotImplementedError

    def next(self) -> Run | None:
        """The next forward to compute, FIFO, or None."""
        raise NotImplementedError

    @property
    def planned(self) -> bool:
        """Another forward is there to be computed."""
        raise NotImplementedError

    def computed(self, run: Run) -> None:
        """The back end is through with it, and its first tokens are out."""
        raise NotImplementedError

    def dropped(self, sequence: Sequence) -> None:
        """It is gone from the engine, well or badly."""

    def loaded(self, msg: LayersLoaded) -> None:
        forward = self.in_hand.get(msg.forward)
        if forward is not None:
            forward.failed.update(msg.failed)
            self._loaded(forward, msg.step)

    def drained(self, msg: ForwardDrained) -> None:
        """Device memory of this forward is quiet."""
        forward = self.in_hand.get(msg.forward)
        if forward is not None:
            forward.failed.update(msg.failed)
            forward.drained = True
            self._end_if_done(forward)

    def _end_if_done(self, forward: InHand) -> None:
        """Once it is computed and drained: what that means for its requests."""
        if not (forward.computed and forward.drained):
            return
        del self.in_hand[forward.plan.forward]
        self.pool.give_back(forward.memory)
        self._forget(forward)
        for sequence in forward.sequences:
            chunk = forward.chunks.get(sequence)
            if sequence.dropped:
                continue
            if sequence.key in forward.failed or chunk is None:
                self.host.lost(sequence)
            elif chunk.last:
                self.host.delivered(sequence)
        self._freed()
        self.host.wake()

    def overdue(self, now: float) -> bool:
        """Device memory of a forward is not quiet in time: it cannot be used again."""
        return any(now > forward.due for forward in self.in_hand.values())

    def abandon(self) -> None:
        """The engine ends: let whoever computes run through."""
        for forward in self.in_hand.values():
            if forward.steps is not None:
                forward.steps.abandon()

    # -- for the two ways --

    def _loaded(self, forward: InHand, step: int) -> None:
        raise NotImplementedError

    def _forget(self, forward: InHand) -> None:
        """It is drained."""

    def _freed(self) -> None:
        """Device memory came free."""

    def _begin(self, forward: InHand) -> None:
        self.in_hand[forward.plan.forward] = forward
        self.host.memory.note_use(self.pool.used)
        self.host.tell(forward.plan)

    def _step_computed(self, forward: InHand, step: int) -> None:
        """The traffic manager may send the rows of this step on."""
        if step == forward.num_steps - 1:
            forward.due = monotonic() + self.host.wait_s
        self.host.tell(LayersComputed(forward.plan.forward, step))

    def _number(self) -> int:
        self._last += 1
        return self._last

    @property
    def num_begun(self) -> int:
        """Forwards that were ever begun."""
        return self._last


def prefill_sequence(sequence: Sequence, chunk: Chunk, row: int, slots: Slots) -> PrefillSequence:
    """What the back end computes of a request whose rows begin at row in each slot."""
    request = sequence.assign.request
    return PrefillSequence(
        SequenceSlice(*chunk.key, row, chunk.cached, chunk.new, chunk.last),
        slots,
        request.tokens_between(chunk.cached, chunk.cached + chunk.new),
        (request.sampling, request.num_generated) if chunk.last else None,
    )
