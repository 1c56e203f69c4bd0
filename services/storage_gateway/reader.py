"""Full Blocks from the store into a traffic manager's buffer: read into staging, then written one-sided (spec §4)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import xxhash

from common.errors import DualPathError, ErrorCode
from common.faults import Faults
from common.log import get_logger
from common.storage.base import BlockStore
from common.tasks import Spawn
from common.transport.base import Batch, Intent, Transfer, TransferError, Transport, make_runs
from common.transport.region import RegionDescriptor
from services.storage_gateway.staging import Lane, damage


@dataclass(slots=True)
class _Delivery:
    """One call. It is open until it is answered; from then on nothing writes to its target."""

    request_id: str
    keys: list[bytes]
    target: RegionDescriptor
    offsets: list[int]
    ok: list[bool]
    missed: bool = False
    open: bool = True
    transfers: set[Transfer] = field(default_factory=set)


class BlockReader:
    """concurrency: blocks of one transfer batch. patience_s bounds a call: its answer comes in the caller's time."""

    def __init__(
        self,
        store: BlockStore,
        lane: Lane,
        transport: Transport,
        region: RegionDescriptor,
        faults: Faults,
        spawn: Spawn,
        concurrency: int,
        patience_s: float,
    ) -> None:
        self._store = store
        self._lane = lane
        self._transport = transport
        self._region = region
        self._faults = faults
        self._spawn = spawn
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._log = get_logger()

    async def read(
        self, request_id: str, keys: list[bytes], target: RegionDescriptor, offsets: list[int]
    ) -> list[bool]:
        """Put each block at its byte offset in target; True where it now is, aligned with keys.

        Blocks after a miss are of no use and may be left out. DualPathError MALFORMED if keys and offsets do not match.
        """
        if len(offsets) != len(keys):
            raise DualPathError(ErrorCode.MALFORMED, f"{len(keys)} blocks, but {len(offsets)} offsets")
        call = _Delivery(request_id, keys, target, offsets, [False] * len(keys))
        try:
            async with asyncio.timeout(self._patience_s):
                await self._deliver(call)
        except TimeoutError:
            self._log.warning("storage read cut short", request=request_id, seconds=self._patience_s)
        finally:
            call.open = False
            await asyncio.gather(*(transfer.cancel() for transfer in call.transfers))
        return list(call.ok)

    async def _deliver(self, call: _Delivery) -> None:
        """As many batches at a time as staging has room for."""
        batches: list[asyncio.Task[None]] = []
        first = 0
        while first < len(call.keys) and not call.missed:
            slots = await self._lane.take(1, min(self._concurrency, len(call.keys) - first))
            batches.append(self._spawn(self._deliver_batch(call, first, slots), f"read for {call.request_id}"))
            first += len(slots)
        if batches:
            await asyncio.wait(batches)

    async def _deliver_batch(self, call: _Delivery, first: int, slots: list[int]) -> None:
        """Owns the slots, beyond the end of the call if the store takes longer."""
        try:
            blocks = range(first, first + len(slots))
            there = await asyncio.gather(
                *(self._read_block(call, block, slot) for block, slot in zip(blocks, slots, strict=True))
            )
            call.missed = call.missed or not all(there)
            good = [(block, slot) for block, slot, ok in zip(blocks, slots, there, strict=True) if ok]
            if good and call.open:
                await self._send(call, good)
        except TransferError as error:
            call.missed = True
            self._log.warning("blocks not delivered", request=call.request_id, error=str(error))
        finally:
            self._lane.give_back(slots)

    async def _send(self, call: _Delivery, good: list[tuple[int, int]]) -> None:
        runs = make_runs(
            [self._lane.offset(slot) for _, slot in good],
            [call.offsets[block] for block, _ in good],
            self._lane.slot_bytes,
        )
        transfer = self._transport.write(Batch(self._region, call.target, runs), Intent.KV_LOAD)
        call.transfers.add(transfer)
        await transfer
        for block, _ in good:
            call.ok[block] = True

    async def _read_block(self, call: _Delivery, block: int, slot: int) -> bool:
        rule = await self._faults.point("storage.read", request=call.request_id, block=block)
        if rule is not None and rule.action == "fail":
            return False
        with self._lane.view(slot) as view:
            if rule is not None and rule.action == "corrupt":
                await self._damage_at_rest(call.keys[block], view)
            return await self._store.read(call.keys[block], view)

    async def _damage_at_rest(self, key: bytes, view: memoryview) -> None:
        if await self._store.read(key, view):
            checksum = xxhash.xxh3_64_intdigest(view)
            damage(view)
            await self._store.write(key, view, checksum)
