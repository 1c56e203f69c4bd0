"""Byte ranges of prefill device memory: who has which. Pure; first fit from the lowest address."""

from __future__ import annotations

from bisect import insort
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
        return max(gap.size for gap in self._gaps())

    def take(self, size: int) -> Range | None:
        """A free range of this size, or None."""
        for gap in self._gaps():
            if gap.size >= size:
                taken = Range(gap.start, gap.start + size)
                insort(self._taken, taken)
                return taken
        return None

    def give_back(self, taken: Range) -> None:
        """ValueError if it is not taken."""
        self._taken.remove(taken)

    def check_integrity(self) -> None:
        """AssertionError if ranges overlap or leave the pool."""
        end = 0
        for taken in self._taken:
            assert end <= taken.start <= taken.stop <= self.total, f"{taken} overlaps or leaves the pool"
            end = taken.stop

    def _gaps(self) -> list[Range]:
        edges = [0, *(edge for taken in self._taken for edge in (taken.start, taken.stop)), self.total]
        return [Range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
