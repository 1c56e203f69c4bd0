"""A growing history of token ids, rendered as JSON only once: the prompts of agents have tens of thousands of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class History:
    """Token ids, in order, with their JSON."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("I", tokens)
        self._json = _digits(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def tolist(self) -> list[int]:
        return self._tokens.tolist()

    def cut(self, length: int) -> None:
        """Keep the first length tokens: the agent fell back to an earlier point."""
        if length < len(self._tokens):
            self._tokens = self._tokens[:length]
            self._json = _digits(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        if tokens:
            self._json = b",".join(filter(None, (self._json, _digits(tokens))))

    def json(self) -> bytes:
        """The tokens as a JSON array."""
        return b"[%b]" % self._json


def _digits(tokens: Iterable[int]) -> bytes:
    return ",".join(map(str, tokens)).encode()
