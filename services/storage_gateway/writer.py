"""Full Blocks from traffic managers into the store: announced, given places in staging, checked, published (spec §4).

    Announce  -> which blocks are wanted; they are in flight from now on
    Reserve   -> places in staging, which the writer alone writes to
    Commit    -> checked against the source's checksum and published; the places are free again

A place belongs to its writer until Commit or until the writer has left the cluster. If neither comes within the
announcement's life, others may store the block, but the place is quarantined: the writer might still write to it.
Should one that was given up for dead do so later, the checksum of whoever has the place by then does not fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import xxhash

from common.errors import DualPathError, ErrorCode
from common.faults import Faults
from common.log import get_logger
from common.metrics import Metrics
from common.storage.base import BlockStore
from common.tasks import Spawn, to_the_end
from services.storage_gateway.callers import Callers
from services.storage_gateway.in_flight import InFlight
from services.storage_gateway.staging import Lane, damage

Place = tuple[str, bytes]
"""(writer's incarnation, block key)."""


class BlockWriter:
    """callers: whose leaving ends what waits for them. query_s bounds announce(), store_s reserve() and commit().
    clock: monotonic seconds."""

    def __init__(
        self,
        store: BlockStore,
        lane: Lane,
        in_flight: InFlight,
        callers: Callers,
        faults: Faults,
        metrics: Metrics,
        spawn: Spawn,
        query_s: float,
        store_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._lane = lane
        self._in_flight = in_flight
        self._callers = callers
        self._faults = faults
        self._spawn = spawn
        self._query_s = query_s
        self._store_s = store_s
        self._clock = clock
        self._places: dict[Place, int] = {}
        self._quarantined: set[Place] = set()
        self._refused = metrics.counter("storage_refused_puts", "Blocks that did not arrive as they were sent")
        self._log = get_logger()

    async def announce(self, writer: str, keys: list[bytes]) -> list[bool]:
        """Which blocks the writer shall send: neither stored nor on their way, nor in a place of its. Aligned with
        keys."""
        self._callers.check(writer)
        self.expire()
        # claimed before the query, which so sees what is published meanwhile
        wanted = self._in_flight.announce(writer, keys, self._clock())
        # the writer may still write to a place whose announcement has lapsed: no second one until it has committed
        placed = {key for key, mine in zip(keys, wanted, strict=True) if mine and (writer, key) in self._places}
        self._in_flight.settle(writer, placed)
        wanted = [mine and key not in placed for key, mine in zip(keys, wanted, strict=True)]
        claimed = [key for key, mine in zip(keys, wanted, strict=True) if mine]
        release = set(claimed)  # all of them, should the query fail
        try:
            async with asyncio.timeout(self._query_s):
                there = await self._store.exists(claimed)
            release = {key for key, stored in zip(claimed, there, strict=True) if stored}
        except TimeoutError:
            raise DualPathError(ErrorCode.STORAGE_FAILED, "the store does not answer") from None
        finally:
            self._in_flight.settle(writer, release)
        return [mine and key not in release for key, mine in zip(keys, wanted, strict=True)]

    async def reserve(self, writer: str, keys: list[bytes]) -> list[int]:
        """Byte offsets of places for the first blocks of keys: for all of them, or for as many as staging ever has.

        DualPathError: STORAGE_FAILED if no place becomes free in time or an announcement has lapsed, MALFORMED for a
        block that has a place already, ENGINE_LOST once the writer has left.
        """
        self.expire()
        keys = keys[: self._lane.pool.total]
        self._check_reservable(writer, keys)
        self._in_flight.renew(writer, keys, self._clock())
        try:
            async with self._callers.patience(writer, self._store_s):
                slots = await self._lane.take(len(keys), len(keys))
        except TimeoutError:
            raise DualPathError(ErrorCode.STORAGE_FAILED, f"no staging within {self._store_s:g} s") from None
        try:
            self._check_reservable(writer, keys)
        except DualPathError:
            self._lane.give_back(slots)
            raise
        self._in_flight.renew(writer, keys, self._clock())
        for key, slot in zip(keys, slots, strict=True):
            self._places[writer, key] = slot
        return [self._lane.offset(slot) for slot in slots]

    async def commit(self, writer: str, keys: list[bytes], ok: list[bool], checksums: list[int]) -> list[bool]:
        """Publish what arrived as it was sent; True where the block is now stored, aligned with keys.

        Blocks that are not ok, or come too late, are given up. DualPathError MALFORMED if the lists do not match.
        """
        if not len(keys) == len(ok) == len(checksums):
            raise DualPathError(ErrorCode.MALFORMED, "keys, ok and checksums differ in length")
        stored = [False] * len(keys)
        work = []
        for index, (key, sent, checksum) in enumerate(zip(keys, ok, checksums, strict=True)):
            place = (writer, key)
            if sent and place in self._places and place not in self._quarantined:
                slot = self._places.pop(place)
                work.append(self._spawn(self._publish(place, slot, checksum, stored, index), "store"))
            else:
                self._free(place)
                self._in_flight.settle(writer, [key])
        if work:
            await asyncio.wait(work, timeout=self._store_s)
        return list(stored)

    def expire(self) -> None:
        """Let announcements lapse whose time is over."""
        for place in self._in_flight.expire(self._clock()):
            if place in self._places:
                self._lane.pool.quarantine([self._places[place]])
                self._quarantined.add(place)

    def left(self, writer: str) -> None:
        """The writer has left the cluster: its blocks do not come any more, and its places are free."""
        self._in_flight.drop(writer)
        for place in [place for place in self._places if place[0] == writer]:
            self._free(place)

    async def _publish(self, place: Place, slot: int, checksum: int, stored: list[bool], index: int) -> None:
        """Owns the slot, beyond the end of the call if the store takes longer."""
        writer, key = place
        try:
            rule = await self._faults.point("storage.write", block=index)
            if rule is not None and rule.action == "fail":
                return
            with self._lane.view(slot) as block:
                if await to_the_end(asyncio.to_thread(xxhash.xxh3_64_intdigest, block)) != checksum:
                    self._refused.inc()
                    self._log.warning("block refused: it did not arrive as it was sent", key=key.hex(), writer=writer)
                    return
                if rule is not None and rule.action == "corrupt":
                    damage(block)
                stored[index] = await self._store.write(key, block, checksum)
        finally:
            self._lane.give_back([slot])
            self._in_flight.settle(writer, [key])

    def _free(self, place: Place) -> None:
        slot = self._places.pop(place, None)
        if slot is None:
            return
        if place in self._quarantined:
            self._quarantined.remove(place)
            self._lane.release([slot])
        else:
            self._lane.give_back([slot])

    def _check_reservable(self, writer: str, keys: list[bytes]) -> None:
        self._callers.check(writer)
        if len(set(keys)) < len(keys) or any((writer, key) in self._places for key in keys):
            raise DualPathError(ErrorCode.MALFORMED, "a block has a place already")
        if not all(self._in_flight.held_by(writer, key) for key in keys):
            raise DualPathError(ErrorCode.STORAGE_FAILED, "a block is not announced, or no longer: announce it again")
