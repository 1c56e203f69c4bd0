"""What cannot be sent is sent again: the member may only have lost its connection for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Seconds between two tries.
AGAIN_S = 0.1


def insist(send: Callable[[], bool], wanted: Callable[[], bool], failed: Callable[[], None], patience_s: float) -> None:
    """Call send() until it returns True, for as long as it is wanted(); failed() once patience_s is over. The first try
    is made at once, and failed() is never called before this returns."""
    loop = asyncio.get_running_loop()
    due = loop.time() + patience_s

    def again() -> None:
        if not wanted() or send():
            return
        if loop.time() < due:
            loop.call_later(AGAIN_S, again)
        else:
            failed()

    if not send():
        loop.call_later(AGAIN_S, again)
