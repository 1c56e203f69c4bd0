"""Who gets what has happened to a request: where tokens go straight, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.messages import Token
from common.types import FinishReason
from services.frontend.inbox import Inbox
from services.frontend.turns import Turns


class Held(Turns):
    """Turns that come when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def come(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def token(index: int) -> Token:
    return Token("request", 0, index, 60 + index)


@pytest.fixture
async def turns() -> Held:
    return Held()


async def test_tokens_go_straight_together_and_wake_nobody(turns: Held) -> None:
    inbox = Inbox(turns)
    told: list[list[Token]] = []
    inbox.straight = told.append
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    for index in range(3):
        inbox.put(0, [token(index)])
    turns.come()
    inbox.put(0, [token(3)])
    turns.come()
    await asyncio.sleep(0)
    assert told == [[token(0), token(1), token(2)], [token(3)]] and not waiting.done()
    inbox.put(0, FinishReason.LENGTH)
    assert await waiting == (0, FinishReason.LENGTH)


async def test_what_cannot_go_straight_wakes_who_waits(turns: Held) -> None:
    inbox = Inbox(turns)
    inbox.straight = lambda tokens: tokens[1:]
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    inbox.put(0, [token(0), token(1)])
    turns.come()
    inbox.put(0, [token(2)])  # behind what was left, in one
    assert await waiting == (0, [token(1), token(2)])


async def test_a_turn_that_comes_late_finds_nothing(turns: Held) -> None:
    """Something else has woken who waits, who has taken the tokens, too, and waits again."""
    inbox = Inbox(turns)
    told: list[list[Token]] = []
    inbox.straight = told.append
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    inbox.put(0, [token(0)])
    inbox.put(0, FinishReason.STOP)
    turns.calls *= 2
    turns.calls.pop(0)()  # before it runs
    assert [await waiting, await inbox.next()] == [(0, [token(0)]), (0, FinishReason.STOP)]
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    turns.come()
    assert told == [] and not waiting.done()
    waiting.cancel()
