"""Tasks that outlive the call that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Starts a task under a name and looks after it to its end (common.service.Service.spawn)."""


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that uses the caller's memory in a thread. If cancelled, let it end all the same before passing that
    on: a thread cannot be stopped, and the memory must not be reused while one is at it."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settle(task)
        raise


async def settle(future: asyncio.Future[Any]) -> None:
    """Wait until it is done, well or not, however often the caller is cancelled, who gets to know of that only then.
    Only for what is sure to end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if not future.cancelled():
        future.exception()  # taken note of
    if cancelled is not None:
        raise cancelled
