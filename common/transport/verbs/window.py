"""Flow control of a queue pair: how many lists may be under way, by the receiver's credits and our send queue. Pure."""

from __future__ import annotations

_WRAP = 1 << 32


class Window:
    """Lists are numbered from 0, modulo 2^32: what fits in a notice.

    A list is over when its notice was acknowledged: the bytes are in place there, and what our NIC might still send is
    a repetition, of which nothing is written. An acknowledgement says how many notices have come in all, so one may
    stand for many. The list's place in the send queue is free when its end, or that of a later one, was signalled here:
    one of every signal_every lists is.
    """

    def __init__(self, credits: int, places: int, signal_every: int) -> None:
        """credits: lists that may be unacknowledged; places: lists that the send queue holds."""
        self._credits = credits
        self._places = places
        self._signal_every = signal_every
        self._posted = 0
        self._sent = 0
        self._acknowledged = 0
        self._over = 0

    @property
    def open(self) -> bool:
        """Whether another list may be posted."""
        return self._posted - self._acknowledged < self._credits and not self.waits_for_sent

    @property
    def waits_for_sent(self) -> bool:
        """Whether no list may be posted before the next one is signalled."""
        return self._posted - self._sent == self._places

    def post(self) -> tuple[int, bool]:
        """The number of the next list, for its notice, and whether it is to be signalled."""
        number = self._posted % _WRAP
        self._posted += 1
        return number, self._posted % self._signal_every == 0

    def sent(self) -> None:
        """The next signal has come. ValueError if there is none to come."""
        if self._posted - self._sent < self._signal_every:
            raise ValueError("a completion of nothing that was posted")
        self._sent += self._signal_every

    def acknowledge(self, count: int) -> None:
        """count, modulo 2^32, notices have come in all. ValueError if that cannot be."""
        new = (count - self._acknowledged) % _WRAP
        if new > self._posted - self._acknowledged:
            raise ValueError("an acknowledgement of what was not sent")
        self._acknowledged += new

    def take_over(self) -> int:
        """How many lists, in order, are over since the last call."""
        new, self._over = self._acknowledged - self._over, self._acknowledged
        return new
