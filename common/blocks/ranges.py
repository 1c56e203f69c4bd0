"""Byte ranges of prefill device memory: who has which. Pure; first fit from the lowest address."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class RangePool:
    """Ranges of [0, total), each taken by one owner until it is given back."""

    total: int
    _taken: list[Range] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(taken.size for taken in self._taken)

    @property
    def largest_free(self) -> int:
        """Size of the largest range that could be taken now."""
        largest = start = 0
        for taken in self._taken:
            largest = max(largest, taken.start - start)
            start = taken.stop
        return max(largest, self.total - start)

    def take(self, size: int) -> Range | None:
        """A free range of this size, or None."""
        start, place = 0, 0
        for taken in self._taken:
            if taken.start - start >= size:
                break
            start = taken.stop
            place += 1
        if start + size > self.total:
            return None
        found = Range(start, start + size)
        self._taken.insert(place, found)
        return found

    def give_back(self, taken: Range) -> None:
        """ValueError if it is not taken."""
        self._taken.remove(taken)

    def check_integrity(self) -> None:
        """AssertionError if ranges overlap or leave the pool."""
        end = 0
        for taken in self._taken:
            assert end <= taken.start <= taken.stop <= self.total, f"{taken} overlaps or leaves the pool"
            end = taken.stop
