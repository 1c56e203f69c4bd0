"""Whoever calls, and how long a call may wait: until its time is over, or until its caller has left the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DualPathError, ErrorCode
from common.latest import Latest


class Callers:
    """Calls that wait, by the incarnation of their caller. On one event loop."""

    def __init__(self) -> None:
        self._waiting: set[tuple[str, asyncio.Timeout]] = set()
        self._departed: Latest[str] = Latest()

    def check(self, caller: str) -> None:
        """DualPathError ENGINE_LOST for one that has left: a message of its may come after that."""
        if caller in self._departed:
            raise DualPathError(ErrorCode.ENGINE_LOST, f"{caller} has left the cluster")

    @asynccontextmanager
    async def patience(self, caller: str, seconds: float) -> AsyncIterator[None]:
        """Bounds what waits inside: TimeoutError after so many seconds, DualPathError as check() as soon as the caller
        has left."""
        self.check(caller)
        try:
            async with asyncio.timeout(seconds) as timeout:
                self._waiting.add((caller, timeout))
                try:
                    yield
                finally:
                    self._waiting.discard((caller, timeout))
        except TimeoutError:
            self.check(caller)
            raise

    def left(self, caller: str) -> None:
        """What waits for it ends now, and it is not heard any more."""
        self._departed.add(caller)
        for whose, timeout in self._waiting:
            if whose == caller and not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())
