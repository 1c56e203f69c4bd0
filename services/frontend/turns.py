"""Many small calls in one callback of the event loop: a callback each would cost more than what they do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

#: Seconds of one callback. Then others have a turn.
TURN_S = 0.002


class Turns:
    """Calls, one after the other, as soon as the loop gets to them. One that raises is the loop's to report, and keeps
    none of the others from its turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def add(self, call: Callable[[], None]) -> None:
        self._due.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        due, time = self._due, self._loop.time
        until = time() + TURN_S
        try:
            while due:
                due.popleft()()
                if time() > until:
                    return
        finally:
            self._scheduled = bool(due)
            if due:
                self._loop.call_soon(self._run)
