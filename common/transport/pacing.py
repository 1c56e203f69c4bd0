"""How one direction of a NIC shares its wire among pieces of transfers, in virtual time. Pure; time is passed in.

A piece of n bytes that starts at s has the wire to itself until s + n / rate, and the next in line starts right then:
a strictly higher class goes first, within a class it is first come, first served. While a higher class would have all
of the wire, the lower ones that wait are owed a small share of it, so that nothing starves (paper §5).

Whoever calls grant() is always a little late. A late piece still counts as started when it was due, so lateness costs
no bandwidth; but not as started more than CATCH_UP_S ago, which bounds the burst: in any t seconds at most
rate * (t + CATCH_UP_S) bytes and one piece are granted. A wire that was idle has no credit from that time, so there is
a burst only where pieces were kept waiting; a piece that comes while another is only granted late follows that one, at
most CATCH_UP_S too early.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

#: Of the bytes that go before a waiting lower class, so much of the wire is owed to it.
LOW_SHARE = 0.001
#: Lateness that is made up for, seconds: for about so long a busy host keeps a process from its core.
CATCH_UP_S = 0.02


@dataclass(eq=False, slots=True)
class Piece:
    """So many bytes that want the wire at once. priority: 0 goes first. start: set when it is granted, seconds."""

    num_bytes: int
    priority: int
    start: float | None = None


class Pacer:
    """One direction of a NIC of rate bytes a second. Each of num_classes priorities has its line."""

    def __init__(self, rate: float, num_classes: int) -> None:
        self.rate = rate
        self._lines: list[deque[Piece]] = [deque() for _ in range(num_classes)]
        self._owed = [0.0] * num_classes  # bytes, per waiting class
        self._free_at = -math.inf

    def ask(self, piece: Piece, since: float) -> None:
        """Put it in line. since: when its bytes were there to be sent, not in the future."""
        if not any(self._lines):
            self._free_at = max(self._free_at, since)  # idle until then
        self._lines[piece.priority].append(piece)

    def withdraw(self, piece: Piece) -> None:
        """It does not want the wire any more. A piece that was granted has had it."""
        if piece.start is None:
            self._lines[piece.priority].remove(piece)
            self._settle(piece.priority)

    @property
    def due_at(self) -> float | None:
        """When grant() next has something to give; None while nobody waits."""
        return self._free_at if any(self._lines) else None

    def grant(self, now: float) -> list[Piece]:
        """The pieces that may start by now, in order."""
        granted = []
        while any(self._lines) and self._free_at <= now:
            piece = self._next()
            piece.start = max(self._free_at, now - CATCH_UP_S)
            self._free_at = piece.start + piece.num_bytes / self.rate
            granted.append(piece)
        return granted

    def _next(self) -> Piece:
        waiting = [priority for priority, line in enumerate(self._lines) if line]
        due = [priority for priority in waiting if self._owed[priority] >= self._lines[priority][0].num_bytes]
        chosen = due[0] if due else waiting[0]
        piece = self._lines[chosen].popleft()
        if due:
            self._owed[chosen] -= piece.num_bytes
        self._settle(chosen)
        for priority in waiting:
            if priority > chosen:
                self._owed[priority] += LOW_SHARE * piece.num_bytes
        return piece

    def _settle(self, priority: int) -> None:
        """Who does not wait is owed nothing."""
        if not self._lines[priority]:
            self._owed[priority] = 0.0
