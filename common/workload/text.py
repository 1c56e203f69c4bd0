"""What prompts consist of: for each trajectory an endless stream of tokens that its name alone decides.

TokenText is real text, the help topics that come with CPython, so that outputs can be read and checked. It differs a
little between Python versions. It is the server that tokenizes it, so prompts hold token ids of the model that is
served. IdText is noise, for models without a tokenizer: any part of a stream can be made again, on its own and fast,
which is how the blocks of a prefix are put into storage before anybody plays the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: How many tokens at the start of a trajectory spell its name.
SIGNATURE_TOKENS = 4


class Stream(Protocol):
    """The new tokens of one trajectory, from its first one on."""

    def take(self, count: int) -> list[int]:
        """The next count tokens."""
        ...


class Text(Protocol):
    """Where trajectories take their new tokens from: the same for the same name, and nobody else's prefix."""

    def stream(self, name: str) -> Stream: ...


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


class IdText:
    """Token ids below vocabulary, decided by the trajectory's name and the position in its stream (a counter hashed by
    splitmix64's finalizer). ValueError for an empty vocabulary or one of more than 2^32."""

    def __init__(self, vocabulary: int) -> None:
        if not 0 < vocabulary <= 1 << 32:
            raise ValueError(f"a vocabulary of {vocabulary} tokens")
        self._vocabulary = np.uint64(vocabulary)

    def tokens(self, name: str, start: int, stop: int) -> NDArray[np.uint32]:
        """Tokens [start, stop) of the stream called name, little-endian [stop - start]: tobytes() packs them."""
        seed = np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), "<u8")
        x = seed + np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        ids: NDArray[np.uint32] = (x % self._vocabulary).astype("<u4")
        return ids

    def stream(self, name: str) -> IdStream:
        """The new tokens of the trajectory called name."""
        return IdStream(self, name)


class IdStream:
    """The tokens of one name, from position 0 on."""

    def __init__(self, text: IdText, name: str) -> None:
        self._text = text
        self._name = name
        self._position = 0

    def take(self, count: int) -> list[int]:
        """The next count tokens."""
        start, self._position = self._position, self._position + count
        ids: list[int] = self._text.tokens(self._name, start, self._position).tolist()
        return ids
