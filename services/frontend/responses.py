"""The answers of the two generation endpoints, whole and as chunks of a stream. Pure: updates in, JSON objects out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from common.types import FinishReason
from services.frontend.schema import GenerationRequest
from services.frontend.updates import Update, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """The API's usage object and, ours, "timing": the parts of the time to first token, in seconds, once known."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    return body if usage.timing is None else body | {"timing": asdict(usage.timing)}


@dataclass(slots=True)
class Answer:
    """Builds the objects of one answer. started: the first chunk has been built."""

    request_id: str
    created: int
    model: str
    token_ids: bool
    include_usage: bool
    continuous_usage: bool
    started: bool = False

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    @classmethod
    def to(cls, request: GenerationRequest, request_id: str, created: int, model: str) -> Answer:
        """The answer to a request, as it asked for it."""
        options = request.stream_options
        return cls(
            f"{cls.id_prefix}-{request_id}",
            created,
            model,
            token_ids=bool(request.return_token_ids),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )

    def chunk(self, update: Update, usage: Usage) -> dict[str, Any]:
        """What a stream sends for one update."""
        choice = self._choice(self._delta(update.text), update.token_ids, update.finish_reason)
        self.started = True
        body = self._body(self.chunk_object, [choice])
        if self.continuous_usage:
            body["usage"] = usage_body(usage)
        elif self.include_usage:
            body["usage"] = None
        return body

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """What a stream sends at its end if it is to include the usage."""
        return self._body(self.chunk_object, []) | {"usage": usage_body(usage)}

    def whole(self, update: Update, usage: Usage) -> dict[str, Any]:
        """All of it at once: one update that is everything."""
        choice = self._choice(self._content(update.text), update.token_ids, update.finish_reason)
        return self._body(self.object, [choice]) | {"usage": usage_body(usage)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, content: dict[str, Any], token_ids: list[int], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason.value if reason else None}
        return choice | {"token_ids": token_ids} if self.token_ids else choice

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class CompletionAnswer(Answer):
    """/v1/completions."""


class ChatAnswer(Answer):
    """/v1/chat/completions: the text is the content of an assistant's message; the first chunk says so."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        if not self.started:
            return {"delta": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}
