"""Many small calls in few callbacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest

from services.frontend.turns import TURN_S, Turns


async def test_all_have_their_turn_in_order_in_one_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    seen: list[int] = []
    scheduled: list[Callable[[], None]] = []
    call_soon = loop.call_soon

    def counted(call: Callable[[], None]) -> object:
        scheduled.append(call)
        return call_soon(call)

    monkeypatch.setattr(loop, "call_soon", counted)
    for number in range(100):
        turns.add(partial(seen.append, number))
    monkeypatch.undo()
    assert seen == [] and len(scheduled) == 1
    await asyncio.sleep(0)
    assert seen == list(range(100))


async def test_others_have_a_turn_in_between() -> None:
    """Also after them: what one of the calls adds is another turn's."""
    turns, seen = Turns(), []

    def slow() -> None:
        time.sleep(TURN_S * 1.1)
        seen.append("call")

    for _ in range(2):
        turns.add(slow)
    asyncio.get_running_loop().call_soon(seen.append, "other")
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == ["call", "other", "call"]
    turns.add(lambda: turns.add(slow))
    await asyncio.sleep(0.01)
    assert seen[3:] == ["call"]


async def test_one_that_raises_is_reported_and_keeps_nobody_from_its_turn() -> None:
    turns, loop, seen = Turns(), asyncio.get_running_loop(), []
    reported: list[str] = []
    loop.set_exception_handler(lambda loop, context: reported.append(str(context["exception"])))

    def broken() -> None:
        raise RuntimeError("broken")

    turns.add(broken)
    turns.add(lambda: seen.append("next"))
    await asyncio.sleep(0.01)
    turns.add(lambda: seen.append("later"))
    await asyncio.sleep(0.01)
    assert seen == ["next", "later"] and reported == ["broken"]
