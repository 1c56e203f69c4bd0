"""The output tokens of one request, put in order over all its attempts. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Progress(Generic[T]):
    """How many tokens are there, which are missing, whether that is all. max_tokens: no index is beyond it. T: a token,
    with whatever comes with it; it is kept only until it is next in order."""

    def __init__(self, max_tokens: int) -> None:
        self.count = 0
        self._max_tokens = max_tokens
        self._early: dict[int, T] = {}
        self._total: int | None = None

    def restart(self) -> None:
        """A new attempt continues after the tokens that are there; what an older one sent out of order is void."""
        self._early.clear()
        self._total = None

    def add(self, index: int, token: T) -> list[T]:
        """The tokens that are now next in order: none for a duplicate, or while an earlier one is missing."""
        if not self.count <= index < self._max_tokens:
            return []
        if index == self.count and not self._early:  # nearly always
            self.count += 1
            return [token]
        self._early.setdefault(index, token)
        ready = []
        while self.count in self._early:
            ready.append(self._early.pop(self.count))
            self.count += 1
        return ready

    def finish(self, total: int) -> None:
        """The engine says that the output has so many tokens."""
        self._total = total

    @property
    def complete(self) -> bool:
        return self._total == self.count and not self._early

    @property
    def gap(self) -> bool:
        """True while something is known to be missing, or more is there than the engine says."""
        return bool(self._early) or (self._total is not None and self._total != self.count)
