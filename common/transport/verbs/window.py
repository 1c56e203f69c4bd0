"""Flow control of a queue pair: how many lists may be under way, by the receiver's credits. Pure."""

from __future__ import annotations

_WRAP = 1 << 32


class Window:
    """Lists are numbered from 0, modulo 2^32: what fits in a notice.

    A list is over when its end was signalled here (our memory is not read any more) and its notice was acknowledged
    there (the bytes are in place). An acknowledgement says how many notices have come in all, so one may stand for many
    and none has to be sent for each.
    """

    def __init__(self, credits: int) -> None:
        self._credits = credits
        self._posted = 0
        self._sent = 0
        self._acknowledged = 0
        self._over = 0

    @property
    def open(self) -> bool:
        """Whether another list may be posted."""
        return self._posted - self._over < self._credits

    @property
    def waits_for_sent(self) -> bool:
        """Whether an acknowledged list has not been signalled yet."""
        return self._acknowledged > self._sent

    def post(self) -> int:
        """The number of the next list, for its notice."""
        number = self._posted % _WRAP
        self._posted += 1
        return number

    def sent(self) -> None:
        """The next list was signalled. ValueError if there is none."""
        if self._sent == self._posted:
            raise ValueError("a completion of nothing that was posted")
        self._sent += 1

    def acknowledge(self, count: int) -> None:
        """count, modulo 2^32, notices have come in all. ValueError if that cannot be."""
        new = (count - self._acknowledged) % _WRAP
        if new > self._posted - self._acknowledged:
            raise ValueError("an acknowledgement of what was not sent")
        self._acknowledged += new

    def take_over(self) -> int:
        """How many lists, in order, are over since the last call."""
        over = min(self._sent, self._acknowledged)
        new, self._over = over - self._over, over
        return new
