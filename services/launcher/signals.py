"""Running a command so that a signal at any moment unwinds it through its own clean-up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run main; its exit status. SIGINT, SIGTERM and SIGHUP cancel it, and again whatever clean-up it is waiting in;
    the status is then 128 + the signal's number, unless main itself answers the cancellation with another."""
    return asyncio.run(_run(main))


async def _run(main: Coroutine[Any, Any, int]) -> int:
    task = asyncio.create_task(main)
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
