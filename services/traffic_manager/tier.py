"""A DRAM tier in front of the store (spec §9, SGL(MC)): blocks that were read stay in their buffer slots. Pure.

    offered by its reader --keep--> idle <--release / acquire--> in use
                                    idle --evicted for another, least recently used first--> the pool's again

A kept block is read only and shared by every request that acquires it. Only a prefix of a prompt's blocks is ever
acquired, and of two blocks of one use the later one counts as used less recently: so a block is gone before those that
it is of no use without.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Kept:
    slot: int
    users: int = 0


class Tier:
    """At most capacity slots, each in use at the pool that they come from for as long as they are kept here."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: dict[bytes, _Kept] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_in_use(self) -> int:
        """Blocks that a request uses."""
        return len(self._kept) - len(self._idle)

    def acquire(self, keys: list[bytes]) -> list[int]:
        """The slots of the longest kept prefix of keys. They stay as they are until they are released."""
        slots = []
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                break
            kept.users += 1
            self._idle.pop(key, None)
            slots.append(kept.slot)
        return slots

    def release(self, keys: list[bytes]) -> None:
        """One user of these acquired blocks is done with them."""
        for key in reversed(keys):
            kept = self._kept[key]
            kept.users -= 1
            if not kept.users:
                self._idle[key] = None

    def keep(self, keys: list[bytes], slots: list[int]) -> list[int]:
        """Take over the slots of blocks that nobody uses any more, as far as there is room. Returns slots for the pool:
        of evicted blocks, of those that are kept already, and of those that find no room (the last ones)."""
        spare, used = [], []
        for key, slot in zip(keys, slots, strict=True):
            if key in self._kept:
                spare.append(slot)
                if key not in self._idle:
                    continue
                del self._idle[key]
            elif len(self._kept) < self.capacity:
                self._kept[key] = _Kept(slot)
            elif self._idle:
                evicted, _ = self._idle.popitem(last=False)
                spare.append(self._kept.pop(evicted).slot)
                self._kept[key] = _Kept(slot)
            else:
                spare.append(slot)
                continue
            used.append(key)
        self._idle.update(dict.fromkeys(reversed(used)))
        return spare

    def check_integrity(self) -> None:
        """AssertionError if a slot is kept twice, or a block is idle and in use."""
        slots = [kept.slot for kept in self._kept.values()]
        assert len(set(slots)) == len(slots) <= self.capacity, "a slot is kept twice, or one too many"
        idle = {key for key, kept in self._kept.items() if not kept.users}
        assert idle == set(self._idle), "a block is idle and in use, or neither"
        assert all(kept.users >= 0 for kept in self._kept.values()), "a block was released twice"
