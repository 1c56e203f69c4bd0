"""A pool of equal slots in one region: who owns which, and proof that none is lost.

    free --take--> used --give back--> free
                   used --quarantine--> quarantined --release--> free

A slot is quarantined while a peer may still write into it (a transfer that was not acknowledged when its owner went
away). free + used + quarantined = total, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SlotPool:
    """Slots first .. first + total - 1. Not thread-safe: one owner."""

    total: int
    first: int = 0
    _free: list[int] = field(init=False)
    _used: set[int] = field(init=False, default_factory=set)
    _quarantined: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._free = list(range(self.first + self.total - 1, self.first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, count: int) -> list[int] | None:
        """count slots, lowest first where possible, or None if fewer are free (nothing is taken then)."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Used slots become free. KeyError for a slot that is not in use (a double free)."""
        for slot in slots:
            self._used.remove(slot)
            self._free.append(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Used slots wait until their writer is known to be quiet."""
        for slot in slots:
            self._used.remove(slot)
            self._quarantined.add(slot)

    def release(self, slots: Iterable[int]) -> None:
        """Quarantined slots become free: their writer is fenced."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._free.append(slot)

    def check_integrity(self) -> None:
        """AssertionError if a slot is lost, doubled or out of range."""
        free = set(self._free)
        states = (free, self._used, self._quarantined)
        assert len(free) == len(self._free), "a slot is free twice"
        assert sum(len(state) for state in states) == self.total, "a slot is lost or in two states"
        assert set().union(*states) == set(range(self.first, self.first + self.total)), "a slot is out of range"
