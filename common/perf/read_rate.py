"""How fast one engine's side reads hits from storage while it reads any. Pure; time is passed in."""

from __future__ import annotations

import math

#: What was read so long ago, in time spent reading, counts 1/e, seconds.
MEMORY_S = 10.0


class ReadRate:
    """tokens_per_s: 0 until it is known. Tokens and reading time are both summed with the same fading weights."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self.tokens_per_s = 0.0
        self._memory_s = memory_s
        self._in_hand = 0
        self._since = 0.0
        self._tokens = 0.0
        self._reading_s = 0.0

    def begin(self, now: float) -> None:
        """A read is asked for."""
        self._advance(now)
        self._in_hand += 1

    def end(self, tokens: int, now: float) -> None:
        """It has brought so many tokens."""
        self._advance(now)
        self._in_hand -= 1
        self._tokens += tokens
        # what is half-way here counts as time and not yet as tokens: little in a long time, too much at first
        if self._reading_s > 0 and (not self._in_hand or self._reading_s >= self._memory_s / 2):
            self.tokens_per_s = self._tokens / self._reading_s

    def _advance(self, now: float) -> None:
        if self._in_hand:
            fade = math.exp((self._since - now) / self._memory_s)
            self._tokens *= fade
            self._reading_s = self._reading_s * fade + self._memory_s * (1 - fade)
        self._since = now
