"""From output tokens to text, token by token: no character cut in two, no part of a stop string shown. Pure.

What is released joins up to exactly what decoding all tokens at once gives, less the stop string and what follows it,
however the tokens arrive.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

#: What decoding shows for bytes that are not UTF-8, among them a character that has not arrived in full.
REPLACEMENT = "\ufffd"
#: Tokens that may wait for a character to become complete. A character has up to 4 bytes, a token at least one; more
#: are only seen where the model generates bytes that are not UTF-8.
MAX_HELD_TOKENS = 8

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


class Pieces(Protocol):
    """Text of a growing token sequence."""

    def push(self, token: int) -> str:
        """The text that this token completes."""

    def finish(self) -> str:
        """What was held back and will not be completed any more."""


class NoText:
    """Of a model without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class ByteDetokenizer:
    """Where each token stands for the same bytes everywhere, text is these bytes as UTF-8. text_bytes: of one token.
    context: the end of the prompt, which may be the begin of a character."""

    def __init__(self, text_bytes: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False  # the decoder holds a part of one
        for token in context:
            self.push(token)

    def push(self, token: int) -> str:
        raw = self._text_bytes(token)
        if not self._in_character and raw.isascii():  # nearly always
            return raw.decode("ascii")
        text = self._decoder.decode(raw)
        self._in_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Detokenizer:
    """Where it depends on what is around a token, only decoding tells.

    Only a short window is decoded each time: the tokens released last, as context (some tokenizers drop the space in
    front of the first token), and those after them. context: the end of the prompt.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context)
        self._num_context = len(self._window)
        self._released = len(decode(self._window).rstrip(REPLACEMENT))

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            released = text[self._released :]
            self._restart(self._window[self._num_context :])
            return released
        if len(self._window) - self._num_context > MAX_HELD_TOKENS:
            return self._release_garbage(text)
        return ""

    def finish(self) -> str:
        return self._decode(self._window)[self._released :]

    def _restart(self, context: list[int]) -> None:
        self._window = context
        self._num_context = len(context)
        self._released = len(self._decode(context))

    def _release_garbage(self, text: str) -> str:
        """Release all but a tail that decodes by itself as it does here: the cut is then between characters."""
        for tail in range(1, 4):
            head_text, tail_text = self._decode(self._window[:-tail]), self._decode(self._window[-tail:])
            if tail_text and head_text + tail_text == text:
                released = head_text[self._released :]
                self._window = self._window[-tail:]
                self._num_context = self._released = 0
                return released
        released = text[self._released :]
        self._restart([])
        return released


class StopStrings:
    """Cuts text in front of the stop string that is complete first; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit = False
        self._stops = stops
        self._held = ""
        self._longest_part = max(map(len, stops), default=1) - 1

    def push(self, text: str, armed: bool = True) -> str:
        """The text that is certain to be shown. Not armed: no stop string may begin in this text."""
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        if not armed:
            return text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.hit = True
            return text[: min(found)[1]]
        for length in range(min(self._longest_part, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return text[:-length]
        return text

    def finish(self) -> str:
        """What was held back: no more text comes to complete it."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one request's output. pieces: at its begin. min_tokens: stop strings do not count in the text of so
    many first tokens."""

    def __init__(self, pieces: Pieces, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = pieces
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete; all text in front of it has been released."""
        return self._stops.hit

    def push(self, token: int) -> str:
        """The text that the client may see now that this token is there."""
        self._num_tokens += 1
        return self._stops.push(self._detokenizer.push(token), armed=self._num_tokens > self._min_tokens)

    def finish(self) -> str:
        """All that was held back, unless it completes a stop string."""
        text = self._stops.push(self._detokenizer.finish(), armed=self._num_tokens > self._min_tokens)
        return text if self.stopped else text + self._stops.finish()
