"""Text to token ids and back, with a model directory's tokenizer.json and no transformers: a front end stays small."""

from __future__ import annotations

import asyncio
import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from common.errors import ConfigError
from services.frontend.detokenize import ByteDetokenizer, Detokenizer, Pieces

#: Longer texts, in characters, are tokenized in a thread, of which so many work at a time.
INLINE_CHARACTERS = 8_192
MAX_THREADS = 2
#: Tokens of a prompt's end that the text of the output may depend on.
CONTEXT_TOKENS = 6
#: A byte of its own, and a space, in the vocabularies that SentencePiece makes.
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_PIECE = "\u2581"


Check = Callable[[int], None]


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
        self._byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self._special = {token for token, what in added.items() if what.special}
        self._text_bytes: dict[int, bytes] = {}  # of tokens that were asked for; bounded by the vocabulary
        self._threads = asyncio.Semaphore(MAX_THREADS)
        release_free_memory()

    async def encode(self, text: str, add_special_tokens: bool, check: Check = lambda count: None) -> list[int]:
        """Token ids of a text. add_special_tokens: with what the model wants around it, such as a first BOS. check: is
        called with their number, and may raise; only then they become a list, which is no work for another thread."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens, check)
        async with self._threads:
            return await asyncio.to_thread(self._encode_large, text, add_special_tokens, check)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> Pieces:
        """For the output that follows this prompt."""
        end = prompt[-CONTEXT_TOKENS:]
        return ByteDetokenizer(self._shown_bytes, end) if self._byte_level else Detokenizer(self.decode, end)

    def _shown_bytes(self, token: int) -> bytes:
        """Of a byte-level vocabulary; special tokens are not shown."""
        shown = self._text_bytes.get(token)
        if shown is None:
            shown = self._text_bytes[token] = b"" if token in self._special else self.token_bytes(token)
        return shown

    def token_bytes(self, token: int) -> bytes:
        """What one token by itself stands for in UTF-8 text, which may be part of a character. Special tokens: their
        names; ids that no token has: nothing."""
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:  # an added token may have characters that stand for no byte: it is then taken as it is
            known = all(character in _BYTES for character in piece)
            return bytes(_BYTES[character] for character in piece) if known else piece.encode()
        if token in self._added:
            return piece.encode()
        if match := BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace(SPACE_PIECE, " ").encode()

    def _encode(self, text: str, add_special_tokens: bool, check: Check) -> list[int]:
        # the batch call, unlike encode(), lets other threads run meanwhile; "fast" leaves out the offsets
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _encode_large(self, text: str, add_special_tokens: bool, check: Check) -> list[int]:
        try:
            return self._encode(text, add_special_tokens, check)
        finally:
            release_free_memory()


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: themselves if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def release_free_memory() -> None:
    """Give freed memory back to the system. Loading a tokenizer and encoding a long text leave tens of megabytes of it,
    which the GNU C library would keep; other C libraries have no such call and need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
