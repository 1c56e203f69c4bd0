"""How a link shares its rate among transfers, in virtual time. Pure: time is passed in and never goes back.

FifoLink: one transfer after the other; when one ends is known as soon as it is sent, without events. FairLink: all
transfers at once, each with its share of the rate (a fluid of infinitely small pieces, in turn); a transfer's end
depends on what comes later, so its owner asks when the next one ends. A share costs nothing for the others: each class
has a clock of virtual bytes, by which every transfer of it has advanced, and a transfer ends when that clock reaches
its own mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any


class FifoLink:
    """rate: bytes a second. sent: bytes of all transfers so far, the one under way included."""

    __slots__ = ("free_at", "rate", "sent")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.sent = 0.0

    def send(self, now: float, num_bytes: float) -> float:
        """Transfer so many bytes, from now on or when all before are through. When the last one is."""
        self.sent += num_bytes
        self.free_at = max(self.free_at, now) + num_bytes / self.rate
        return self.free_at


def through(sender: FifoLink, receiver: FifoLink, now: float, num_bytes: float) -> float:
    """When so many bytes, from now on, have left by one link and come in by another at the same time."""
    sender.sent += num_bytes
    receiver.sent += num_bytes
    left = (sender.free_at if sender.free_at > now else now) + num_bytes / sender.rate
    came = (receiver.free_at if receiver.free_at > now else now) + num_bytes / receiver.rate
    sender.free_at, receiver.free_at = left, came
    return left if left > came else came


class _Class:
    """Transfers that share one weight evenly. clock: virtual bytes; marks: (mark, number, bytes, item), a heap. served:
    bytes that have passed; completed: of transfers that have ended."""

    __slots__ = ("clock", "completed", "marks", "served", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.clock = 0.0
        self.marks: list[tuple[float, int, float, Any]] = []
        self.served = 0.0
        self.completed = 0.0


class FairLink:
    """rate: bytes a second. weights: of the classes; those that have transfers share the rate in proportion."""

    __slots__ = ("_active", "_at", "_classes", "_numbers", "_rate", "_weight")

    def __init__(self, rate: float, weights: Sequence[float] = (1.0,)) -> None:
        self._rate = rate
        self._at = 0.0
        self._classes = [_Class(weight) for weight in weights]
        self._active: list[_Class] = []
        self._weight = 0.0  # of the active ones
        self._numbers = count()

    @property
    def rate(self) -> float:
        return self._rate

    def set_rate(self, now: float, rate: float) -> None:
        """From now on. 0: it stands still."""
        self.advance(now)
        self._rate = rate

    @property
    def busy(self) -> bool:
        return bool(self._active)

    def advance(self, now: float) -> None:
        """Let what is under way go on until now."""
        actives = self._active
        if actives and now > self._at:
            passed = (now - self._at) * self._rate
            if len(actives) == 1:
                (only,) = actives
                only.clock += passed / len(only.marks)
                only.served += passed
            else:
                for active in actives:
                    share = passed * active.weight / self._weight
                    active.clock += share / len(active.marks)
                    active.served += share
        self._at = now

    def start(self, now: float, num_bytes: float, item: Any, kind: int = 0) -> None:
        """A transfer of class number `kind`; item is handed back when it ends."""
        self.advance(now)
        its = self._classes[kind]
        if not its.marks:
            its.clock = 0.0
            self._active.append(its)
            self._weight += its.weight
        heappush(its.marks, (its.clock + num_bytes, next(self._numbers), num_bytes, item))

    def next_end(self) -> float:
        """When the next transfer ends if none is added; infinity if none is under way."""
        if not self._active:
            return math.inf
        if len(self._active) == 1 and self._rate > 0:
            (active,) = self._active
            return self._at + (active.marks[0][0] - active.clock) * len(active.marks) / self._rate
        soonest = math.inf
        for active in self._active:
            left = active.marks[0][0] - active.clock
            speed = self._rate * active.weight / (self._weight * len(active.marks))
            ends = self._at + left / speed if speed > 0 else math.inf
            soonest = min(soonest, ends)
        return soonest

    def finished(self, now: float) -> list[Any]:
        """The items of all transfers that have ended by now, in order. Ask at next_end()."""
        due = self.next_end() <= now + 1e-12 * (1.0 + now)  # it was told before, and may differ by rounding
        self.advance(now)
        if not due:
            return []
        ended: list[Any] = []
        for active in list(self._active):
            marks = active.marks
            slack = 1e-9 * marks[0][2] + 1e-11 * self._rate  # likewise
            while marks and marks[0][0] <= active.clock + slack:
                _, _, num_bytes, item = heappop(marks)
                active.completed += num_bytes
                ended.append(item)
            if not marks:
                active.served = active.completed  # without what rounding has left
                self._active.remove(active)
                self._weight = sum(other.weight for other in self._active)
        return ended

    def served(self, now: float, kind: int = 0) -> float:
        """Bytes of a class that have passed by now."""
        self.advance(now)
        return self._classes[kind].served
