"""Decode side: staged blocks into device pages, and full blocks to storage (paper §4.1, labels 6-9 and persistence).

Blocks are announced to storage before the engine is told, so that the next turn's lookup knows of them; the bytes
follow. Prompt blocks are stored from the buffer slots that they were staged in, generated ones through a few slots of
their own, so that persisting never waits for a request that waits for pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import compress
from typing import Any

from common.blocks.geometry import BlockGeometry
from common.config import TimeoutsConfig
from common.errors import DualPathError
from common.log import get_logger
from common.messages import Done, LoadPages, PagesPersisted, PersistPages
from common.transport.base import Batch, Intent, Transport
from common.transport.region import RegionDescriptor
from common.types import split_keys
from services.traffic_manager.hops import Hop, Hops
from services.traffic_manager.requests import DecodeRequests
from services.traffic_manager.runs import block_runs
from services.traffic_manager.staging import SlotQueue
from services.traffic_manager.store import STORE_BATCH, BlockStoreClient


class Pages:
    """Copies between the buffer and decode device memory. buffer and device are regions of the compute transport."""

    def __init__(
        self,
        geometry: BlockGeometry,
        transport: Transport,
        buffer: RegionDescriptor,
        device: RegionDescriptor,
        requests: DecodeRequests,
        staging: SlotQueue,
        persisting: SlotQueue,
        store: BlockStoreClient,
        hops: Hops,
        timeouts: TimeoutsConfig,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        tell: Callable[[object], None],
    ) -> None:
        self._geometry = geometry
        self._transport = transport
        self._buffer = buffer
        self._device = device
        self._requests = requests
        self._staging = staging
        self._persisting = persisting
        self._store = store
        self._hops = hops
        self._timeouts = timeouts
        self._spawn = spawn
        self._tell = tell
        self.num_storing = 0  # batches of blocks that were announced and are not yet stored or given up
        self._log = get_logger()

    async def load(self, msg: LoadPages) -> Done:
        """Staged blocks to pages (none: the request has ended with its first token and is only persisted).

        Slots are freed here, those of new full blocks once they are stored.
        """
        slots = self._requests.take_over(msg.request_id, msg.attempt)
        keys = split_keys(msg.keys)[msg.cached_blocks :]
        announced = asyncio.ensure_future(self._store.announce(keys))
        try:
            runs = block_runs(self._geometry, slots[: len(msg.pages)], msg.pages)
            batch = Batch(self._buffer, self._device, runs)
            await self._hops.write(self._transport, batch, Intent.KV_LOAD, Hop.H2D)
        finally:
            wanted = await announced
            self._spawn(self._store_staged(slots, keys, msg.cached_blocks, wanted), f"store {msg.request_id}")
        return Done()

    async def _store_staged(self, slots: list[int], keys: list[bytes], first: int, wanted: list[bool]) -> None:
        """Store the wanted blocks of slots[first:]; the other slots are given back at once."""
        self.num_storing += 1
        keep = list(compress(slots[first : first + len(keys)], wanted))
        kept = set(keep)
        self._staging.give_back([slot for slot in slots if slot not in kept])
        try:
            await self._store.store(list(compress(keys, wanted)), keep)
        finally:
            self.num_storing -= 1
            self._staging.give_back(keep)

    async def persist(self, msg: PersistPages) -> Done:
        """Announce generated blocks, then copy them out behind."""
        keys = split_keys(msg.keys)
        wanted = await self._store.announce(keys)
        pages, keys = list(compress(msg.pages, wanted)), list(compress(keys, wanted))
        self._spawn(self._persist(msg.ticket, pages, keys), f"persist {msg.ticket}")
        return Done()

    async def _persist(self, ticket: int, pages: list[int], keys: list[bytes]) -> None:
        self.num_storing += 1
        batch = min(STORE_BATCH, self._persisting.pool.total)
        for start in range(0, len(pages), batch):
            stop = start + batch
            await self._persist_batch(pages[start:stop], keys[start:stop], ticket if stop >= len(pages) else None)
        if not pages:
            self._tell(PagesPersisted(ticket))
        self.num_storing -= 1

    async def _persist_batch(self, pages: list[int], keys: list[bytes], ticket: int | None) -> None:
        slots: list[int] = []
        try:
            slots = await self._persisting.take(len(pages), self._timeouts.store_s)
            runs = block_runs(self._geometry, pages, slots)
            batch = Batch(self._device, self._buffer, runs)
            await self._hops.write(self._transport, batch, Intent.KV_PERSIST, Hop.D2H)
        except DualPathError as error:
            self._log.warning("generated blocks not stored", blocks=len(pages), error=str(error))
            self._persisting.give_back(slots)
            await self._store.give_up(keys)
            slots = []
        finally:
            if ticket is not None:
                self._tell(PagesPersisted(ticket))
        if slots:
            try:
                await self._store.store(keys, slots)
            finally:
                self._persisting.give_back(slots)
