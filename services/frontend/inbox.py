"""What has happened to a request and its client has not been told yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from common.messages import Token
from common.types import FinishReason
from services.frontend.turns import Turns
from services.frontend.updates import Update

Event = list[Token] | Update | FinishReason | Exception
"""Tokens that arrived together, what the client is to be told of them, the end, a failure."""

Straight = Callable[[list[Token]], Event | None]
"""Tells the client of tokens at once. What is left of them for whoever waits; None: nothing."""


class Inbox:
    """Events in order, each with its attempt, for one who waits in next().

    straight: where tokens go while nothing else is there, so that nobody has to be woken for them. Tokens that come
    faster than they are taken are one event; what repeats stays out, so there are at most max_tokens of them.
    """

    def __init__(self, turns: Turns) -> None:
        self.straight: Straight | None = None
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, attempt: int, event: Event) -> None:
        events = self._events
        if events and isinstance(event, list):
            last = events[-1][1]
            if isinstance(last, list):
                last += event
                return
        events.append((attempt, event))
        if self._waiting is None or self._waiting.done():
            return
        if self.straight is not None and isinstance(event, list):
            self._turns.add(self._tell)
        else:
            self._waiting.set_result(None)

    async def next(self) -> tuple[int, Event]:
        """The oldest event and its attempt, once there is one."""
        while not self._events:
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._events.popleft()

    def _tell(self) -> None:
        if not self._events or self._waiting is None or self._waiting.done() or self.straight is None:
            return  # something else has happened: whoever is woken for that takes everything, or has done so
        attempt, tokens = self._events.popleft()
        assert isinstance(tokens, list) and not self._events
        left = self.straight(tokens)
        if left is not None:
            self._events.append((attempt, left))
            self._waiting.set_result(None)
