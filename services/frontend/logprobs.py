"""Log probabilities in the two forms of the API: /v1/completions' parallel lists, and chats' list of objects. Pure.

There is one entry for each token that the usage counts, those that end the output or complete a stop string included.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from common.messages import Token
from common.types import Logprobs

TokenBytes = Callable[[int], bytes]
"""A token id -> what it stands for in UTF-8, maybe part of a character."""

NONE = Logprobs(0.0)


def chat_logprobs(tokens: Sequence[Token], token_bytes: TokenBytes) -> dict[str, Any]:
    """The object of a chat's choice, whole or for a chunk."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = []
    for token in tokens:
        logprobs = token.logprobs or NONE
        top = [entry(other, value) for other, value in logprobs.top]
        content.append({**entry(token.token, logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The objects of one choice of a completion, chunk by chunk. prefix: text in front of the output (echo).

    The text of a token that is not whole characters is "bytes:" and its bytes, as OpenAI writes it. text_offset counts
    characters of the choice's text; a token that is part of one begins where the character does.
    """

    def __init__(self, token_bytes: TokenBytes, prefix: str = "") -> None:
        self._token_bytes = token_bytes
        self._offset = len(prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """The object for the next tokens."""
        texts, offsets, values, tops = [], [], [], []
        for token in tokens:
            logprobs = token.logprobs or NONE
            raw = self._token_bytes(token.token)
            texts.append(_text(raw))
            offsets.append(self._offset)
            values.append(logprobs.chosen)
            top = {_text(self._token_bytes(other)): value for other, value in logprobs.top}
            tops.append({**top, texts[-1]: logprobs.chosen})
            self._offset += len(self._decoder.decode(raw))
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
