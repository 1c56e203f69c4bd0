"""One layerwise forward, seen from the prefill side's traffic manager (paper §4.1, Figure 4 labels 3-7).

Device memory holds num_slots layers, in lanes of layers_per_step. Each lane is one loop: load the cached rows of its
next step, tell the engine, wait until that step is computed, send the rows on, go a round of lanes further. So the
loads and sends of the layers around overlap with the compute of the layers in hand, and no slot is ever touched by two
layers.

Cached rows come from our own buffer as far as it has slots for them, else from the decode buffer: on the PE path it has
slots for the whole prompt, on the DE path none, in a split read those of our part of the hits. While chunks follow, new
rows for which our buffer has slots are kept there. Rows go to the decode buffer once, except those that it has read.

A forward may begin while the one before it is in hand, with the next chunk of a request that is in both: of each layer
it loads that request's rows once the earlier chunk's are where they are loaded from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.blocks.geometry import BlockGeometry
from common.errors import DualPathError
from common.log import get_logger
from common.messages import BeginForward, ForwardDrained, LayersLoaded, SequenceSlice
from common.transport.base import Batch, Intent, Transport
from common.transport.region import RegionDescriptor
from common.types import RequestKey
from services.traffic_manager.hops import Hop, Hops
from services.traffic_manager.push import PushWindow, PushWindows
from services.traffic_manager.runs import Layers, RowRuns, StepRuns, buffer_to_rows, rows_to_buffer
from services.traffic_manager.staging import Sender, Staged


@dataclass(slots=True)
class _Sequence:
    """A sequence of this forward: where it is staged, and the rows that its decode buffer does not hold yet. after: the
    forward in hand that has its chunk before this one, until this one ends."""

    place: SequenceSlice
    staged: Staged
    after: Sender | None
    runs: dict[Hop, StepRuns] = field(default_factory=dict)

    pushed: tuple[int, int] | None = None  # rows [start, stop) that the decode side pushes

    @property
    def stop(self) -> int:
        return self.place.cached + self.place.new


class Forward:
    """Runs one BeginForward plan. All regions are those of the compute transport. tell(msg) sends to the engine."""

    def __init__(
        self,
        plan: BeginForward,
        staged: dict[RequestKey, Staged],
        geometry: BlockGeometry,
        transport: Transport,
        buffer: RegionDescriptor,
        device: RegionDescriptor,
        windows: PushWindows,
        hops: Hops,
        tell: Callable[[object], None],
    ) -> None:
        self.plan = plan
        self._geometry = geometry
        self._transport = transport
        self._buffer = buffer
        self._device = device
        self._windows = windows
        self._hops = hops
        self._tell = tell
        self._slot_bytes = plan.rows * geometry.row_bytes
        self._num_steps = -(-geometry.num_layers // plan.layers_per_step)
        self._computed = [asyncio.Event() for _ in range(self._num_steps)]
        self._sent = [asyncio.Event() for _ in range(self._num_steps)]
        self._failed: dict[RequestKey, str] = {}
        self._log = get_logger()
        self._sequences: list[_Sequence] = []
        for place in plan.sequences:
            key = (place.request_id, place.attempt)
            if key in staged and staged[key].peer_staged is not None:
                self._sequences.append(_Sequence(place, staged[key], staged[key].sender))
                staged[key].sender = self
            else:
                self._failed[key] = "not staged"

    def computed(self, step: int) -> None:
        """The engine has written the new rows of this step's layers."""
        self._computed[step].set()

    async def sent(self, key: RequestKey, layers: Layers) -> bool:
        """As services.traffic_manager.staging.Sender."""
        per_step = self.plan.layers_per_step
        for step in range(layers.first // per_step, -(-(layers.first + layers.count) // per_step)):
            await self._sent[step].wait()
        return key not in self._failed

    async def run(self) -> list[SequenceSlice]:
        """Returns when device memory is quiet, with the sequences whose rows are all delivered."""
        for sequence in self._sequences:
            self._plan_runs(sequence)
        pushing = any(sequence.pushed for sequence in self._sequences)
        async with self._windows.open() if pushing else nullcontext() as window, asyncio.TaskGroup() as group:
            for lane in range(self.plan.num_slots // self.plan.layers_per_step):
                group.create_task(self._lane(lane, window))
        for sequence in self._alive():
            # the forward of the next chunk may have ended before us
            sequence.staged.sent = max(sequence.staged.sent, sequence.stop)
        for sequence in self._sequences:
            sequence.after = None  # else each would keep all before it
            if sequence.staged.sender is self:
                sequence.staged.sender = None
        self._tell(ForwardDrained(self.plan.forward, list(self._failed)))
        return [sequence.place for sequence in self._alive()]

    def _plan_runs(self, sequence: _Sequence) -> None:
        place, staged, geometry = sequence.place, sequence.staged, self._geometry
        assert staged.peer_staged is not None, "only staged sequences are in a forward"
        own = staged.plan.blocks * geometry.block_size  # rows that have a place in our buffer
        loaded, kept = min(place.cached, own), min(sequence.stop, own)
        read_there = staged.hits(geometry.block_size)
        sent = staged.sent if sequence.after is None else place.cached
        lacking = [(sent, min(read_there[0], sequence.stop)), (max(sent, read_there[1]), sequence.stop)]

        def plan(hop: Hop, make: RowRuns, slots: list[int], *ranges: tuple[int, int]) -> None:
            rows = [(start, stop) for start, stop in ranges if start < stop]
            if rows:
                sequence.runs[hop] = StepRuns(make, geometry, slots, rows)

        plan(Hop.HANDOFF, rows_to_buffer, staged.peer_staged.slots, *lacking)
        plan(Hop.LOAD, buffer_to_rows, staged.slots, (0, loaded))
        if not place.last:
            plan(Hop.KEEP, rows_to_buffer, staged.slots, (place.cached, kept))
        if loaded < place.cached:
            sequence.pushed = (loaded, place.cached)

    def _alive(self) -> list[_Sequence]:
        """Sequences whose rows still matter. A released one has no slots any more."""
        for sequence in self._sequences:
            if sequence.staged.released:
                self._failed.setdefault(sequence.staged.key, "released")
        return [sequence for sequence in self._sequences if sequence.staged.key not in self._failed]

    async def _lane(self, lane: int, window: PushWindow | None) -> None:
        per_step = self.plan.layers_per_step
        base = self.plan.base + lane * per_step * self._slot_bytes
        for step in range(lane, self._num_steps, self.plan.num_slots // per_step):
            first = step * per_step
            layers = Layers(first, min(per_step, self._geometry.num_layers - first), self._slot_bytes)
            await self._load(layers, base, window)
            self._tell(LayersLoaded(self.plan.forward, step, list(self._failed)))
            await self._computed[step].wait()
            await self._send(layers, base)
            self._sent[step].set()

    async def _follow(self, layers: Layers) -> None:
        """Of sequences with an earlier chunk in hand: wait until its rows of these layers have been sent."""
        for sequence in self._sequences:
            key = sequence.staged.key
            if sequence.after is not None and not await sequence.after.sent(key, layers):
                self._failed.setdefault(key, "its chunk before failed")

    async def _load(self, layers: Layers, base: int, window: PushWindow | None) -> None:
        """Cached rows into the slots: ours by loopback writes through our own NIC, the decode side's pushed by it."""
        await self._follow(layers)
        work = []
        for sequence in self._alive():
            target = base + sequence.place.row * self._geometry.row_bytes
            if Hop.LOAD in sequence.runs:
                runs = sequence.runs[Hop.LOAD].at(layers, target)
                work.append(self._write(sequence, self._buffer, self._device, runs, Intent.KV_LOAD, Hop.LOAD))
            if sequence.pushed is not None:
                assert window is not None, "opened where anything is pushed"
                push = partial(window.push, sequence.staged, layers, sequence.pushed, target)
                work.append(self._guard(sequence, push))
        await asyncio.gather(*work)

    async def _send(self, layers: Layers, base: int) -> None:
        """Rows that the decode buffer lacks, and new rows that a later chunk will load again."""
        work = []
        for sequence in self._alive():
            remote = sequence.staged.peer_staged
            assert remote is not None, "only staged sequences are in a forward"
            source = base + sequence.place.row * self._geometry.row_bytes
            if Hop.HANDOFF in sequence.runs:
                runs = sequence.runs[Hop.HANDOFF].at(layers, source)
                work.append(self._write(sequence, self._device, remote.buffer, runs, Intent.PD_HANDOFF, Hop.HANDOFF))
            if Hop.KEEP in sequence.runs:
                runs = sequence.runs[Hop.KEEP].at(layers, source)
                work.append(self._write(sequence, self._device, self._buffer, runs, Intent.KV_LOAD, Hop.KEEP))
        await asyncio.gather(*work)

    async def _write(
        self,
        sequence: _Sequence,
        source: RegionDescriptor,
        target: RegionDescriptor,
        runs: NDArray[np.int64],
        intent: Intent,
        hop: Hop,
    ) -> None:
        write = partial(self._hops.write, self._transport, Batch(source, target, runs), intent, hop)
        await self._guard(sequence, write)

    async def _guard(self, sequence: _Sequence, work: Callable[[], Awaitable[None]]) -> None:
        """A failure costs this sequence, not the batch."""
        try:
            async with sequence.staged.use():
                await work()
        except DualPathError as error:
            if sequence.staged.key not in self._failed:
                self._log.warning("sequence dropped from forward", request=sequence.staged.key[0], error=str(error))
            self._failed[sequence.staged.key] = str(error)
