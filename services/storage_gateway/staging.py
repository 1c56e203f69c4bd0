"""The gateway's staging memory: two lanes of Full Block slots, one for reads, one for stores.

Apart from one another, so that a writer that stalls with its slots full cannot stop the reads that requests wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from common.blocks.pool import SlotPool
from common.errors import ConfigError
from common.transport.memory import Memory


class Lane:
    """Slots of slot_bytes in memory, from slot first on; handed out in order of arrival.

    Slots are numbered from 0 in each lane; offset() and view() say where a slot lies in memory.
    """

    def __init__(self, memory: Memory, slot_bytes: int, first: int, total: int) -> None:
        self.pool = SlotPool(total)
        self._memory = memory
        self.slot_bytes = slot_bytes
        self._first = first
        self._turn = asyncio.Lock()  # fair: its waiters go in order
        self._freed = asyncio.Event()

    async def take(self, least: int, most: int) -> list[int]:
        """At least `least` slots (at most the lane's size) and at most `most`. Waits; the caller bounds the wait."""
        async with self._turn:
            while self.pool.num_free < least:
                self._freed.clear()
                await self._freed.wait()
            slots = self.pool.take(min(most, self.pool.num_free))
        assert slots is not None
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Slots in use become free."""
        self.pool.give_back(slots)
        self._freed.set()

    def release(self, slots: Iterable[int]) -> None:
        """Quarantined slots become free."""
        self.pool.release(slots)
        self._freed.set()

    def offset(self, slot: int) -> int:
        """Byte offset of the slot in the region."""
        return (self._first + slot) * self.slot_bytes

    def view(self, slot: int) -> memoryview:
        """The slot's bytes; to be released (it is a context manager), or memory cannot be closed."""
        return self._memory.view[self.offset(slot) : self.offset(slot) + self.slot_bytes]


class Staging:
    """num_bytes of memory, divided into slots of slot_bytes, half of them for reads. ConfigError if it is too small."""

    def __init__(self, num_bytes: int, slot_bytes: int) -> None:
        total = num_bytes // slot_bytes
        if total < 2:
            raise ConfigError(
                f"storage.staging of {num_bytes} bytes is too small: one block to read and one to store take "
                f"{2 * slot_bytes}"
            )
        self.memory = Memory.create("storage-staging", total * slot_bytes)
        self.reads = Lane(self.memory, slot_bytes, 0, total - total // 2)
        self.stores = Lane(self.memory, slot_bytes, total - total // 2, total // 2)

    @property
    def num_free(self) -> int:
        return self.reads.pool.num_free + self.stores.pool.num_free

    @property
    def in_use(self) -> int:
        return self.reads.pool.num_used + self.stores.pool.num_used

    def check_integrity(self) -> None:
        self.reads.pool.check_integrity()
        self.stores.pool.check_integrity()

    def close(self) -> None:
        self.memory.close()


def damage(block: memoryview) -> None:
    """The fault seams' "corrupt": one bit, in the exponent of the block's last element, so that it tells."""
    block[-1] ^= 0x40
