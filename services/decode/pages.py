"""Pages of decode device memory: who has them, and which are still being copied out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.blocks.pool import SlotPool


@dataclass(slots=True)
class PagePool:
    """Pages of one block each. A pinned page that is given back becomes free when it is unpinned."""

    pool: SlotPool
    _pinned: set[int] = field(default_factory=set)
    _orphaned: set[int] = field(default_factory=set)

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_leaving(self) -> int:
        """Pages that become free by themselves."""
        return len(self._orphaned)

    def take(self, count: int) -> list[int] | None:
        """count pages, or None."""
        return self.pool.take(count)

    def give_back(self, pages: list[int]) -> None:
        """The sequence that had them has ended."""
        pinned = self._pinned.intersection(pages)
        self._orphaned |= pinned
        self.pool.give_back(page for page in pages if page not in pinned)

    def pin(self, page: int) -> None:
        """Somebody reads this page until unpin()."""
        self._pinned.add(page)

    def unpin(self, page: int) -> None:
        self._pinned.remove(page)
        if page in self._orphaned:
            self._orphaned.remove(page)
            self.pool.give_back([page])

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        assert self._orphaned <= self._pinned, "an orphaned page is not pinned"
