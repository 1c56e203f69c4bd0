"""The virtual clock: events in the order of their times, and of their making where these are equal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Handler = Callable[[Any], None]


class Clock:
    """now: seconds since the start of the run. events: handled so far."""

    __slots__ = ("_events", "_numbers", "_recurring", "events", "now", "stopped")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self._events: list[tuple[float, int, Handler, Any]] = []
        self._numbers = count()
        self._recurring = 0

    def at(self, time: float, handler: Handler, argument: Any = None) -> None:
        """Call handler(argument) then. What has been put on the clock stays there: a handler whose time has passed it
        by finds that out itself."""
        heappush(self._events, (time, next(self._numbers), handler, argument))

    def every(self, period: float, handler: Callable[[], None]) -> None:
        """Call handler() every so many seconds. That alone does not keep the run going."""
        self._recurring += 1

        def again(_: None) -> None:
            handler()
            self.at(self.now + period, again)

        self.at(self.now + period, again)

    def run(self) -> None:
        """Handle events until only recurring ones are left, or stop() is called."""
        events, handled = self._events, 0
        while len(events) > self._recurring and not self.stopped:
            self.now, _, handler, argument = heappop(events)
            handled += 1
            handler(argument)
        self.events += handled

    def stop(self) -> None:
        """The event in hand is the last one."""
        self.stopped = True
