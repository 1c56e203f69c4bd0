"""Full Blocks from the store into a traffic manager's buffer (spec §4, labels 1-2).

Large blocks in the page cache go straight from their files where the way there takes files, and are verified where they
arrive. Others, and those with which that fails, are read into staging, verified there and then written one-sided.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import xxhash

from common.errors import DualPathError, ErrorCode
from common.faults import Fault, Faults
from common.log import get_logger
from common.storage.base import BlockStore
from common.tasks import Spawn
from common.transport.base import Batch, FileBatch, FilePart, Intent, Transfer, TransferError, Transport, make_runs
from common.transport.region import RegionDescriptor
from services.storage_gateway.callers import Callers
from services.storage_gateway.in_flight import InFlight
from services.storage_gateway.staging import Lane, damage
from services.storage_gateway.waiting import landed

#: Blocks that are read by one thread in one go and sent as one transfer: many small ones, or one large one.
BATCH_BYTES = 512 << 10
#: Blocks of at least so many bytes go straight from their files, about so many bytes as one transfer.
DIRECT_BYTES, DIRECT_BATCH_BYTES = 256 << 10, 32 << 20
#: But no more blocks than these, each of which is an open file.
DIRECT_BATCH_BLOCKS = 32


@dataclass(slots=True, eq=False)
class _Delivery:
    """One call. It is open until it is answered; from then on nothing writes to its target."""

    request_id: str
    keys: list[bytes]
    target: RegionDescriptor
    offsets: list[int]
    caller: str
    ok: list[bool]
    missed: bool = False
    open: bool = True
    transfers: set[Transfer] = field(default_factory=set)
    batches: list[asyncio.Task[None]] = field(default_factory=list)


class BlockReader:
    """concurrency: batches to one NIC that may be under way, so that a NIC with a long queue does not take the staging
    of the others. patience_s bounds a call: its answer comes in the caller's time. It ends when the caller leaves."""

    def __init__(
        self,
        store: BlockStore,
        lane: Lane,
        in_flight: InFlight,
        callers: Callers,
        transport: Transport,
        region: RegionDescriptor,
        faults: Faults,
        spawn: Spawn,
        concurrency: int,
        patience_s: float,
    ) -> None:
        self._store = store
        self._lane = lane
        self._in_flight = in_flight
        self._callers = callers
        self._transport = transport
        self._region = region
        self._faults = faults
        self._spawn = spawn
        self._concurrency = concurrency
        self._calls: set[_Delivery] = set()
        self._turns: dict[str, asyncio.Semaphore] = {}  # by target's NIC; fair
        self._patience_s = patience_s
        # half of the lane at most, so that a batch that hangs leaves room for others
        self._batch_blocks = max(1, min(BATCH_BYTES // lane.slot_bytes, lane.pool.total // 2))
        direct = min(DIRECT_BATCH_BLOCKS, max(1, DIRECT_BATCH_BYTES // lane.slot_bytes))
        self._direct_blocks = direct if lane.slot_bytes >= DIRECT_BYTES else 0
        self._log = get_logger()

    async def read(
        self, request_id: str, keys: list[bytes], target: RegionDescriptor, offsets: list[int], caller: str
    ) -> list[bool]:
        """Put each block at its byte offset in target; True where it now is, aligned with keys. Waits for blocks that
        are in flight.

        Blocks after a miss are of no use and may be left out. DualPathError: MALFORMED if keys and offsets do not
        match, ENGINE_LOST once the caller has left.
        """
        if len(offsets) != len(keys):
            raise DualPathError(ErrorCode.MALFORMED, f"{len(keys)} blocks, but {len(offsets)} offsets")
        call = _Delivery(request_id, keys, target, offsets, caller, [False] * len(keys))
        self._calls.add(call)
        try:
            async with self._callers.patience(caller, self._patience_s):
                await self._deliver(call)
        except TimeoutError:
            self._log.warning("storage read cut short", request=request_id, seconds=self._patience_s)
        finally:
            self._calls.remove(call)
            call.open = False
            for batch in call.batches:  # each has begun, and gives back what it owns, as soon as no thread uses that
                batch.cancel()
            await asyncio.gather(*(transfer.cancel() for transfer in call.transfers))
        return list(call.ok)

    def left(self, caller: str) -> None:
        """The caller has left the cluster: what is on its way to it fails now."""
        for call in self._calls:
            if call.caller == caller:
                call.open = False
                self._transport.give_up(call.target)

    async def _deliver(self, call: _Delivery) -> None:
        """As many batches at a time as the NIC may have and staging has room for."""
        turns = self._turns.setdefault(call.target.nic, asyncio.Semaphore(self._concurrency))
        first = 0
        while first < len(call.keys) and not call.missed:
            await landed(self._in_flight, call.keys[first])
            await turns.acquire()
            try:
                work, count = await self._next_batch(call, first)
            except BaseException:
                turns.release()
                raise
            batch = self._spawn(work, f"read for {call.request_id}")
            batch.add_done_callback(lambda _: turns.release())
            call.batches.append(batch)
            first += count
        if call.batches:
            await asyncio.wait(call.batches)

    async def _next_batch(self, call: _Delivery, first: int) -> tuple[Coroutine[Any, Any, None], int]:
        """What delivers the blocks from number first on, and how many of them."""
        if self._direct_blocks and self._transport.takes_files(call.target):
            # a batch is opened while those before it are on their way, and the first one, of which there is none, is
            # one block; one batch at a time, as threads that open files take turns with the one that sends
            count = self._num_ready(call.keys[first : first + (self._direct_blocks if first else 1)])
            parts = await self._store.open_parts(call.keys[first : first + count])
            return self._deliver_directly(call, dict(zip(range(first, first + count), parts, strict=True))), count
        slots = await self._lane.take(1, self._num_ready(call.keys[first : first + self._batch_blocks]))
        blocks = list(range(first, first + len(slots)))
        return self._deliver_batch(call, blocks, slots, self._strike(call, blocks)), len(slots)

    def _num_ready(self, keys: list[bytes]) -> int:
        """How many blocks to read now: up to the next one that is in flight. The first has been waited for."""
        return next((index for index, key in enumerate(keys) if index and key in self._in_flight), len(keys))

    async def _deliver_directly(self, call: _Delivery, parts: dict[int, FilePart | None]) -> None:
        """Blocks, by number, out of their files, as far as that goes; the others through staging. Owns the files."""
        blocks = list(parts)
        struck = dict(zip(blocks, self._strike(call, blocks), strict=True))
        found = {block: part for block, part in parts.items() if part is not None}
        try:
            if found and call.open and not any(struck.values()):
                await self._send_files(call, found)
        finally:
            for part in found.values():
                os.close(part.fd)
        blocks = [block for block in blocks if not call.ok[block]]
        while blocks and call.open:
            slots = await self._lane.take(1, min(len(blocks), self._batch_blocks))
            batch, blocks = blocks[: len(slots)], blocks[len(slots) :]
            await self._deliver_batch(call, batch, slots, [struck[block] for block in batch])

    async def _send_files(self, call: _Delivery, parts: dict[int, FilePart]) -> None:
        """Blocks that do not arrive are not marked as there."""
        batch = FileBatch(tuple(parts.values()), call.target, tuple(call.offsets[block] for block in parts))
        try:
            await self._finish(call, self._transport.write_files(batch, Intent.KV_LOAD), list(parts))
            self._store.count_read(len(parts))
        except TransferError as error:
            self._log.warning("blocks not sent from their files", request=call.request_id, error=str(error))

    async def _deliver_batch(
        self, call: _Delivery, blocks: list[int], slots: list[int], rules: list[Fault | None]
    ) -> None:
        """Owns the slots, beyond the end of the call if the store takes longer."""
        try:
            there = await self._read_blocks(call, blocks, slots, rules)
            call.missed = call.missed or not all(there)
            good = [(block, slot) for block, slot, ok in zip(blocks, slots, there, strict=True) if ok]
            if good and call.open:
                runs = make_runs(
                    [self._lane.offset(slot) for _, slot in good],
                    [call.offsets[block] for block, _ in good],
                    self._lane.slot_bytes,
                )
                transfer = self._transport.write(Batch(self._region, call.target, runs), Intent.KV_LOAD)
                await self._finish(call, transfer, [block for block, _ in good])
        except TransferError as error:
            call.missed = True
            self._log.warning("blocks not delivered", request=call.request_id, error=str(error))
        finally:
            self._lane.give_back(slots)

    async def _finish(self, call: _Delivery, transfer: Transfer, blocks: list[int]) -> None:
        """Returns when these blocks are in place. However it ends, nothing is read or written any more then."""
        call.transfers.add(transfer)
        try:
            await transfer
        finally:
            await transfer.cancel()
        for block in blocks:
            call.ok[block] = True

    def _strike(self, call: _Delivery, blocks: list[int]) -> list[Fault | None]:
        """What these blocks have to suffer."""
        return [self._faults.strike("storage.read", request=call.request_id, block=block) for block in blocks]

    async def _read_blocks(
        self, call: _Delivery, blocks: list[int], slots: list[int], rules: list[Fault | None]
    ) -> list[bool]:
        """Blocks into the slots; which of them are there."""
        keys = [call.keys[block] for block in blocks]
        delay_s = max(rule.seconds if rule is not None else 0.0 for rule in rules)
        if delay_s:
            await asyncio.sleep(delay_s)
        with ExitStack() as views:
            into = [views.enter_context(self._lane.view(slot)) for slot in slots]
            for rule, key, view in zip(rules, keys, into, strict=True):
                if rule is not None and rule.action == "corrupt":
                    await self._damage_at_rest(key, view)
            there = await self._store.read(keys, into)
        return [ok and (rule is None or rule.action != "fail") for ok, rule in zip(there, rules, strict=True)]

    async def _damage_at_rest(self, key: bytes, view: memoryview) -> None:
        if all(await self._store.read([key], [view])):
            checksum = xxhash.xxh3_64_intdigest(view)
            damage(view)
            await self._store.write(key, view, checksum)
