"""Tasks that outlive the call that started them."""

from __future__ import annotations

import asyncio

import pytest

from common.tasks import settle


async def test_who_is_cancelled_while_it_settles_gets_to_know_once_it_has() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    settling = asyncio.create_task(settle(future))
    for _ in range(3):
        await asyncio.sleep(0.01)
        settling.cancel()
    await asyncio.sleep(0.01)
    assert not settling.done()
    future.set_exception(OSError("taken note of"))
    with pytest.raises(asyncio.CancelledError):
        await settling
