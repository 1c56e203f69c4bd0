"""The DRAM tier of a prefill engine (services.traffic_manager.tier), counted in blocks of trajectories. Pure.

Only prefixes are ever used, and of two blocks of one use the later one counts as used less recently. So of each
trajectory a prefix is kept, and what is evicted are the last blocks of the one whose last use is longest ago.
"""

from __future__ import annotations

from collections import OrderedDict


class Tier:
    """At most capacity blocks. A trajectory in use is not evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        self._kept: OrderedDict[str, int] = OrderedDict()  # blocks, least recently used first
        self._users: dict[str, int] = {}

    def acquire(self, trajectory: str, blocks: int) -> int:
        """How many of its first blocks are kept. They stay until they are released."""
        found = min(self._kept.get(trajectory, 0), blocks)
        self._users[trajectory] = self._users.get(trajectory, 0) + 1
        return found

    def release(self, trajectory: str, blocks: int) -> None:
        """A user is done, and leaves its first blocks, as many as find room."""
        users = self._users.pop(trajectory) - 1
        if users:
            self._users[trajectory] = users
        kept = self._kept.get(trajectory, 0)
        wanted = max(blocks - kept, 0)
        self._make_room(wanted, trajectory)
        added = min(wanted, self.capacity - self.blocks)
        if kept + added:
            self._kept[trajectory] = kept + added
            self._kept.move_to_end(trajectory)
            self.blocks += added

    def _make_room(self, blocks: int, but: str) -> None:
        for trajectory in list(self._kept):
            lacking = self.blocks + blocks - self.capacity
            if lacking <= 0:
                return
            if trajectory == but or trajectory in self._users:
                continue
            evicted = min(self._kept[trajectory], lacking)
            self._kept[trajectory] -= evicted
            self.blocks -= evicted
            if not self._kept[trajectory]:
                del self._kept[trajectory]
