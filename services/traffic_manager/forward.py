"""One layerwise forward, seen from the prefill side's traffic manager (paper §4.1, Figure 4 labels 3-7).

Device memory holds num_slots layers, in lanes of layers_per_step. Each lane is one loop: load the cached rows of its
next step, tell the engine, wait until that step is computed, send the rows on, go a round of lanes further. So the
loads and sends of the layers around overlap with the compute of the layers in hand, and no slot is ever touched by two
layers.

Rows go to the decode buffer once: on the PE path hits and misses, on the DE path only misses. While chunks follow, the
PE path also keeps the new rows in its own buffer, from where the next chunk loads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from services.traffic_manager.push import PushClient
from services.traffic_manager.runs import Layers, StepRuns, buffer_to_rows, rows_to_buffer
from services.traffic_manager.staging import Staged


@dataclass(slots=True)
class _Sequence:
    """A sequence of this forward: where it is staged, and the rows that its decode buffer does not hold yet."""

    place: SequenceSlice
    staged: Staged
    runs: dict[Hop, StepRuns] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.place.cached + self.place.new

    @property
    def reads_here(self) -> bool:
        """PE path: cached rows lie in our own buffer."""
        return self.staged.plan.blocks > 0


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
        pushes: PushClient,
        hops: Hops,
        tell: Callable[[object], None],
    ) -> None:
        self.plan = plan
        self._geometry = geometry
        self._transport = transport
        self._buffer = buffer
        self._device = device
        self._pushes = pushes
        self._hops = hops
        self._tell = tell
        self._slot_bytes = plan.rows * geometry.row_bytes
        self._num_steps = -(-geometry.num_layers // plan.layers_per_step)
        self._computed = [asyncio.Event() for _ in range(self._num_steps)]
        self._failed: dict[RequestKey, str] = {}
        self._log = get_logger()
        self._sequences: list[_Sequence] = []
        for place in plan.sequences:
            key = (place.request_id, place.attempt)
            if key in staged and staged[key].peer_staged is not None:
                self._sequences.append(_Sequence(place, staged[key]))
            else:
                self._failed[key] = "not staged"

    def computed(self, step: int) -> None:
        """The engine has written the new rows of this step's layers."""
        self._computed[step].set()

    async def run(self) -> list[SequenceSlice]:
        """Returns when device memory is quiet, with the sequences whose rows are all delivered."""
        for sequence in self._sequences:
            self._plan_runs(sequence)
        async with asyncio.TaskGroup() as group:
            for lane in range(self.plan.num_slots // self.plan.layers_per_step):
                group.create_task(self._lane(lane))
        await self._pushes.settle()
        for sequence in self._alive():
            sequence.staged.sent = sequence.stop
        self._tell(ForwardDrained(self.plan.forward, list(self._failed)))
        return [sequence.place for sequence in self._alive()]

    def _plan_runs(self, sequence: _Sequence) -> None:
        place, staged = sequence.place, sequence.staged
        assert staged.peer_staged is not None, "only staged sequences are in a forward"
        sent = max(staged.sent, 0 if sequence.reads_here else place.cached)
        geometry, stop = self._geometry, sequence.stop
        sequence.runs[Hop.HANDOFF] = StepRuns(rows_to_buffer, geometry, staged.peer_staged.slots, sent, stop)
        if sequence.reads_here:
            sequence.runs[Hop.LOAD] = StepRuns(buffer_to_rows, geometry, staged.slots, 0, place.cached)
            if not place.last:
                sequence.runs[Hop.KEEP] = StepRuns(rows_to_buffer, geometry, staged.slots, place.cached, stop)

    def _alive(self) -> list[_Sequence]:
        """Sequences whose rows still matter. A released one has no slots any more."""
        for sequence in self._sequences:
            if sequence.staged.released:
                self._failed.setdefault(sequence.staged.key, "released")
        return [sequence for sequence in self._sequences if sequence.staged.key not in self._failed]

    async def _lane(self, lane: int) -> None:
        per_step = self.plan.layers_per_step
        base = self.plan.base + lane * per_step * self._slot_bytes
        for step in range(lane, self._num_steps, self.plan.num_slots // per_step):
            first = step * per_step
            layers = Layers(first, min(per_step, self._geometry.num_layers - first), self._slot_bytes)
            await self._load(layers, base)
            self._tell(LayersLoaded(self.plan.forward, step, list(self._failed)))
            await self._computed[step].wait()
            await self._send(layers, base)

    async def _load(self, layers: Layers, base: int) -> None:
        """Cached rows into the slots: ours by loopback writes through our own NIC, the decode side's pushed by it."""
        work = []
        for sequence in self._alive():
            cached = sequence.place.cached
            if not cached:
                continue
            target = base + sequence.place.row * self._geometry.row_bytes
            if sequence.reads_here:
                runs = sequence.runs[Hop.LOAD].at(layers, target)
                work.append(self._write(sequence, self._buffer, self._device, runs, Intent.KV_LOAD, Hop.LOAD))
            else:
                push = partial(self._pushes.push, sequence.staged, layers, cached, self._device, target)
                work.append(self._guard(sequence, push))
        await asyncio.gather(*work)

    async def _send(self, layers: Layers, base: int) -> None:
        """Rows that the decode buffer lacks, and new rows that a later chunk will load again."""
        work = []
        for sequence in self._alive():
            remote = sequence.staged.peer_staged
            assert remote is not None, "only staged sequences are in a forward"
            source = base + sequence.place.row * self._geometry.row_bytes
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
