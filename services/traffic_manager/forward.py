"""One layerwise forward, seen from the prefill side's traffic manager (paper §4.1, Figure 4 labels 3-7).

Device memory holds num_slots layers. Each slot is one loop: load the cached rows of its next layer, tell the engine,
wait until that layer is computed, send the rows on, take the layer num_slots further. So the loads and sends of the
layers around overlap with the compute of the layer in hand, and a slot is never touched by two layers.

Rows go to the decode buffer once: on the PE path hits and misses, on the DE path only misses. While chunks follow, the
PE path also keeps the new rows in its own buffer, from where the next chunk loads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.blocks.geometry import BlockGeometry
from common.errors import DualPathError
from common.log import get_logger
from common.messages import BeginForward, ForwardDrained, LayerLoaded, SequenceSlice
from common.rpc import Peer
from common.transport.base import Batch, Intent, Transport
from common.transport.region import RegionDescriptor
from common.types import RequestKey
from services.traffic_manager.hops import Hop, Hops
from services.traffic_manager.push import PushClient
from services.traffic_manager.runs import buffer_to_rows, rows_to_buffer
from services.traffic_manager.staging import Staged


@dataclass(slots=True)
class _Sequence:
    """A sequence of this forward: where it is staged, and the rows that its decode buffer does not hold yet."""

    place: SequenceSlice
    staged: Staged

    @property
    def stop(self) -> int:
        return self.place.cached + self.place.new

    @property
    def reads_here(self) -> bool:
        """PE path: cached rows lie in our own buffer."""
        return self.staged.plan.blocks > 0


class Forward:
    """Runs one BeginForward plan. All regions are those of the compute transport."""

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
        engine: Peer,
    ) -> None:
        self.plan = plan
        self._geometry = geometry
        self._transport = transport
        self._buffer = buffer
        self._device = device
        self._pushes = pushes
        self._hops = hops
        self._engine = engine
        self._computed = [asyncio.Event() for _ in range(geometry.num_layers)]
        self._failed: dict[RequestKey, str] = {}
        self._log = get_logger()
        self._sequences: list[_Sequence] = []
        for place in plan.sequences:
            key = (place.request_id, place.attempt)
            if key in staged and staged[key].peer_staged is not None:
                self._sequences.append(_Sequence(place, staged[key]))
            else:
                self._failed[key] = "not staged"

    def computed(self, layer: int) -> None:
        """The engine has written the new rows of this layer."""
        self._computed[layer].set()

    async def run(self) -> list[SequenceSlice]:
        """Returns when device memory is quiet, with the sequences whose rows are all delivered."""
        for sequence in self._sequences:
            sequence.staged.sent = max(sequence.staged.sent, 0 if sequence.reads_here else sequence.place.cached)
        async with asyncio.TaskGroup() as group:
            for slot in range(self.plan.num_slots):
                group.create_task(self._slot(slot))
        await self._pushes.settle()
        for sequence in self._alive():
            sequence.staged.sent = sequence.stop
        self._engine.send(ForwardDrained(self.plan.forward, list(self._failed)))
        return [sequence.place for sequence in self._alive()]

    def _alive(self) -> list[_Sequence]:
        """Sequences whose rows still matter. A released one has no slots any more."""
        for sequence in self._sequences:
            if sequence.staged.released:
                self._failed.setdefault(sequence.staged.key, "released")
        return [sequence for sequence in self._sequences if sequence.staged.key not in self._failed]

    async def _slot(self, slot: int) -> None:
        base = slot * self.plan.rows * self._geometry.row_bytes
        for layer in range(slot, self._geometry.num_layers, self.plan.num_slots):
            await self._load(layer, base)
            self._engine.send(LayerLoaded(self.plan.forward, layer, list(self._failed)))
            await self._computed[layer].wait()
            await self._send(layer, base)

    async def _load(self, layer: int, base: int) -> None:
        """Cached rows into the slot: ours by loopback writes through our own NIC, the decode side's pushed by it."""
        work = []
        for sequence in self._alive():
            cached = sequence.place.cached
            if not cached:
                continue
            target = base + sequence.place.row * self._geometry.row_bytes
            if sequence.reads_here:
                runs = buffer_to_rows(self._geometry, sequence.staged.slots, layer, 0, cached, target)
                work.append(self._write(sequence, self._buffer, self._device, runs, Intent.KV_LOAD, Hop.LOAD))
            else:
                push = partial(self._pushes.push, sequence.staged, layer, cached, self._device, target)
                work.append(self._guard(sequence, push))
        await asyncio.gather(*work)

    async def _send(self, layer: int, base: int) -> None:
        """Rows that the decode buffer lacks, and new rows that a later chunk will load again."""
        work = []
        for sequence in self._alive():
            place, staged = sequence.place, sequence.staged
            assert staged.peer_staged is not None, "only staged sequences are in a forward"
            source = base + place.row * self._geometry.row_bytes
            remote = staged.peer_staged
            runs = rows_to_buffer(self._geometry, remote.slots, layer, staged.sent, sequence.stop, source)
            work.append(self._write(sequence, self._device, remote.buffer, runs, Intent.PD_HANDOFF, Hop.HANDOFF))
            if sequence.reads_here and not place.last:
                runs = rows_to_buffer(self._geometry, staged.slots, layer, place.cached, sequence.stop, source)
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
