"""A breaker: keeps a dependency that does not answer out of the critical path."""

from __future__ import annotations

from common.clock import Clock


class Breaker:
    """Open for seconds after each trip(); then the dependency is tried again."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until = float("-inf")

    @property
    def open(self) -> bool:
        """True: do not try."""
        return self._clock() < self._until

    def trip(self) -> None:
        self._until = self._clock() + self._seconds
