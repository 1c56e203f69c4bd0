"""Prompt tokens from real text: the help topics that come with CPython, so that outputs can be read and checked.

The text differs a little between Python versions. It is the server that tokenizes it, so prompts hold token ids of the
model that is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

#: How many tokens at the start of a trajectory spell its name.
SIGNATURE_TOKENS = 4


def corpus() -> str:
    """All of CPython's help topics, in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class TokenText:
    """A tokenized text from which each trajectory takes its new tokens. ValueError if it is empty."""

    def __init__(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise ValueError("the text has no tokens")
        self._tokens = list(tokens)
        self._vocabulary = sorted(set(self._tokens))

    def stream(self, name: str) -> TokenStream:
        """The new tokens of the trajectory called name: the same for the same name, and nobody else's prefix.

        A few words of the text that spell the name's digest, then the text from a position of the name's own. The
        words see to it that trajectories do not share blocks where the text repeats itself.
        """
        digest = blake2b(name.encode(), digest_size=8 + 4 * SIGNATURE_TOKENS).digest()
        start = int.from_bytes(digest[:8], "big") % len(self._tokens)
        words = [int.from_bytes(digest[i : i + 4], "big") for i in range(8, len(digest), 4)]
        signature = [self._vocabulary[word % len(self._vocabulary)] for word in words]
        return TokenStream(signature, self._tokens, start)


class TokenStream:
    """Endless tokens: the signature, then the text from start, round and round."""

    def __init__(self, signature: list[int], tokens: list[int], start: int) -> None:
        self._signature = signature
        self._tokens = tokens
        self._position = start

    def take(self, count: int) -> list[int]:
        """The next count tokens."""
        taken = self._signature[:count]
        self._signature = self._signature[count:]
        while len(taken) < count:
            piece = self._tokens[self._position : self._position + count - len(taken)]
            taken += piece
            self._position = (self._position + len(piece)) % len(self._tokens)
        return taken
