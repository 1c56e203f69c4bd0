"""Time, injected: services read the wall clock's monotonic time, tests and the simulator a virtual one."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds on a monotonic scale whose zero means nothing."""

monotonic: Clock = time.monotonic


class VirtualClock:
    """A clock that only moves when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward; ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self.now += seconds
