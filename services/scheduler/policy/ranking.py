"""The least of many items whose keys change often."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SLACK = 64


class Ranking(Generic[T]):
    """A heap in which a change adds an entry (but to the least item); outdated ones are dropped when they surface.

    An item is ranked by a number, and among equals by another one that no two items share. place, remove and least take
    amortised O(log n); least_of looks at every item.
    """

    __slots__ = ("_entries", "_heap", "_limit")

    def __init__(self) -> None:
        self._entries: dict[T, tuple[int, int, T]] = {}  # of each item the one that counts
        self._heap: list[tuple[int, int, T]] = []
        self._limit = _SLACK  # entries at which the outdated ones are thrown out

    def place(self, item: T, key: int, tie: int) -> None:
        """Add an item, or move it."""
        heap, old = self._heap, self._entries.get(item)
        if old is not None and old[0] == key and old[1] == tie:
            return
        entry = self._entries[item] = (key, tie, item)
        if old is not None and heap[0] is old:
            heapreplace(heap, entry)
            return
        heappush(heap, entry)
        if len(heap) > self._limit:
            self._heap = list(self._entries.values())
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK

    def remove(self, item: T) -> None:
        """Nothing happens if it is not there."""
        self._entries.pop(item, None)

    def least(self) -> T | None:
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heappop(heap)
        return None

    def least_of(self, accepted: Callable[[T], bool]) -> T | None:
        """The least of the accepted items."""
        return min((entry for entry in self._entries.values() if accepted(entry[2])), default=(0, 0, None))[2]

    @property
    def keys(self) -> dict[T, tuple[int, int]]:
        """Every item, and what it is ranked by."""
        return {item: (key, tie) for key, tie, item in self._entries.values()}
