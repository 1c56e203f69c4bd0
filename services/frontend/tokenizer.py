"""Text to token ids and back, with a model directory's tokenizer.json and no transformers: a front end stays small."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from common.errors import ConfigError

#: Longer texts, in characters, are tokenized in a thread, of which so many work at a time.
INLINE_CHARACTERS = 8_192
MAX_THREADS = 2


class Tokenizer:
    """Encodes and decodes as the model's authors meant. Truncation and padding in the file are ignored."""

    def __init__(self, path: Path) -> None:
        """path: a tokenizer.json. ConfigError if it cannot be read."""
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = asyncio.Semaphore(MAX_THREADS)
        release_free_memory()

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. add_special_tokens: with what the model wants around it, such as a first BOS."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        async with self._threads:
            return await asyncio.to_thread(self._encode_large, text, add_special_tokens)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # the batch call, unlike encode(), lets other threads run meanwhile; "fast" leaves out the offsets
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _encode_large(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._encode(text, add_special_tokens)
        release_free_memory()
        return ids


def release_free_memory() -> None:
    """Give freed memory back to the system. Loading a tokenizer and encoding a long text leave tens of megabytes of it,
    which the GNU C library would keep; other C libraries have no such call and need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
