"""Blocks on their way into storage: who announced them, since when, and who waits for them. Pure; time is passed in.

absent --announce--> in flight --settle (stored or given up) | expire | drop (its writer left)--> absent
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: More announced blocks than this at a time are not wanted.
MAX_IN_FLIGHT = 1 << 16

Wake = Callable[[], None]


@dataclass(slots=True)
class _Flight:
    writer: str
    since: float
    waiters: list[Wake] = field(default_factory=list)


class InFlight:
    """Announced and unfinished blocks, by key. An announcement lasts expiry_s from its last sign of life."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._flights: dict[bytes, _Flight] = {}  # oldest sign of life first

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: bytes) -> bool:
        return key in self._flights

    def held_by(self, writer: str, key: bytes) -> bool:
        """Whether this writer announced the block, and the announcement still stands."""
        flight = self._flights.get(key)
        return flight is not None and flight.writer == writer

    def announce(self, writer: str, keys: Sequence[bytes], now: float) -> list[bool]:
        """Which of the blocks are now this call's to send; the others are on their way already, or one too many."""
        claimed = []
        for key in keys:
            free = key not in self._flights and len(self._flights) < MAX_IN_FLIGHT
            if free:
                self._flights[key] = _Flight(writer, now)
            claimed.append(free)
        return claimed

    def renew(self, writer: str, keys: Iterable[bytes], now: float) -> None:
        """A sign of life for those of the blocks that this writer still holds."""
        for key in keys:
            if self.held_by(writer, key):
                flight = self._flights.pop(key)
                flight.since = now
                self._flights[key] = flight

    def settle(self, writer: str, keys: Iterable[bytes]) -> None:
        """These blocks are stored or given up, as far as this writer holds them; their waiters wake."""
        for key in keys:
            if self.held_by(writer, key):
                self._end(key)

    def expire(self, now: float) -> list[tuple[str, bytes]]:
        """End every announcement older than expiry_s; returns their writers and keys."""
        expired = []
        for key, flight in self._flights.items():
            if now - flight.since < self._expiry_s:
                break
            expired.append((flight.writer, key))
        for _, key in expired:
            self._end(key)
        return expired

    def drop(self, writer: str) -> None:
        """This writer is gone, and so is everything that it announced."""
        for key in [key for key, flight in self._flights.items() if flight.writer == writer]:
            self._end(key)

    def wait(self, key: bytes, wake: Wake) -> bool:
        """Have wake called once the block is no longer in flight; False, and no call, if it is not now."""
        flight = self._flights.get(key)
        if flight is not None:
            flight.waiters.append(wake)
        return flight is not None

    def forget(self, key: bytes, wake: Wake) -> None:
        """The waiter has given up, if it has not been woken yet."""
        flight = self._flights.get(key)
        if flight is not None and wake in flight.waiters:
            flight.waiters.remove(wake)

    def _end(self, key: bytes) -> None:
        for wake in self._flights.pop(key).waiters:
            wake()
