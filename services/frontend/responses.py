"""The answers of the two generation endpoints, whole and as chunks of a stream. Pure: updates in, JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from common.types import FinishReason
from services.frontend.logprobs import CompletionLogprobs, TokenBytes, chat_logprobs
from services.frontend.schema import ChatRequest, GenerationRequest
from services.frontend.tool_parser import ToolCall, ToolParser
from services.frontend.updates import Update, Usage

Json = dict[str, Any]


def usage_body(usage: Usage) -> Json:
    """The API's usage object and, ours, "timing": the parts of the time to first token, in seconds, once known."""
    body: Json = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    return body if usage.timing is None else body | {"timing": usage.timing._asdict()}


class Choice:
    """One of an answer's choices: keeps what later chunks need to know of earlier ones."""

    def __init__(self, index: int, request: GenerationRequest) -> None:
        self._index = index
        self._token_ids = bool(request.return_token_ids)
        self._with_logprobs = request.alternatives is not None

    def chunk(self, update: Update) -> Json:
        """What a stream sends for one update."""
        return self._body(self._delta(update), update)

    def whole(self, update: Update) -> Json:
        """All of it at once: one update that is everything."""
        return self._body(self._content(update), update)

    def _body(self, content: Json, update: Update) -> Json:
        logprobs = self._logprobs(update) if self._with_logprobs and update.tokens else None
        body = {"index": self._index, **content, "logprobs": logprobs, "finish_reason": self._reason(update)}
        if self._token_ids:
            body["token_ids"] = update.token_ids
        return body

    def _reason(self, update: Update) -> str | None:
        return update.finish_reason and update.finish_reason.value

    def _delta(self, update: Update) -> Json:
        raise NotImplementedError

    def _content(self, update: Update) -> Json:
        raise NotImplementedError

    def _logprobs(self, update: Update) -> Json:
        raise NotImplementedError


class CompletionChoice(Choice):
    """prefix: the prompt's text, where it is to be echoed."""

    def __init__(self, index: int, request: GenerationRequest, token_bytes: TokenBytes, prefix: str) -> None:
        super().__init__(index, request)
        self._prefix = prefix
        self._entries = CompletionLogprobs(token_bytes, prefix)

    def _delta(self, update: Update) -> Json:
        text, self._prefix = self._prefix + update.text, ""
        return {"text": text}

    _content = _delta

    def _logprobs(self, update: Update) -> Json:
        return self._entries.add(update.tokens)


class ChatChoice(Choice):
    """The text is the content of an assistant's message, less the tool calls in it; the first chunk says so.

    request_id: of the call; ids of tool calls follow from it. tools: finds the calls; None: there are none to find.
    """

    def __init__(
        self, index: int, request: ChatRequest, token_bytes: TokenBytes, request_id: str, tools: ToolParser | None
    ) -> None:
        super().__init__(index, request)
        self._token_bytes = token_bytes
        self._request_id = request_id
        self._tools = tools
        self._only_one = request.parallel_tool_calls is False
        self._num_calls = 0
        self._begun = False

    def _delta(self, update: Update) -> Json:
        content, calls = self._parts(update)
        delta: Json = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        return {"delta": delta}

    def _content(self, update: Update) -> Json:
        content, calls = self._parts(update)
        message: Json = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": [call for _, call in calls]}
        return {"message": message}

    def _reason(self, update: Update) -> str | None:
        if update.finish_reason is FinishReason.STOP and self._num_calls:
            return "tool_calls"
        return super()._reason(update)

    def _parts(self, update: Update) -> tuple[str, list[tuple[int, Json]]]:
        """Content, and calls by their number in the answer."""
        if self._tools is None:
            return update.text, []
        content, found = self._tools.push(update.text)
        if update.finish_reason is not None:
            rest, last = self._tools.finish()
            content, found = content + rest, found + last
        if self._only_one:
            found = found[: 1 - self._num_calls]
        first = self._num_calls
        self._num_calls += len(found)
        return content, [(number, self._call(number, call)) for number, call in enumerate(found, first)]

    def _call(self, number: int, call: ToolCall) -> Json:
        name = f"{self._request_id}/{self._index}/{number}"
        identity = f"call_{blake2b(name.encode(), digest_size=12).hexdigest()}"
        return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _logprobs(self, update: Update) -> Json:
        return chat_logprobs(update.tokens, self._token_bytes)


class Answer:
    """Builds the objects of one answer."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request: GenerationRequest, request_id: str, created: int, model: str, choices: Sequence[Choice]
    ) -> None:
        self._head: Json = {"id": f"{self.id_prefix}-{request_id}", "object": "", "created": created, "model": model}
        self._choices = choices
        self._chunk_head = to_json(self._body(self.chunk_object, [])).removesuffix(b"]}")
        options = request.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)

    def chunk(self, index: int, update: Update, usage: Usage | None) -> bytes:
        """What a stream sends for one update of one choice, in one line. usage: for continuous usage."""
        tail = b"]}"
        if usage is not None:
            tail = b'],"usage":%b}' % to_json(usage_body(usage))
        elif self.include_usage:
            tail = b'],"usage":null}'
        return self._chunk_head + to_json(self._choices[index].chunk(update)) + tail

    def usage_chunk(self, usage: Usage) -> bytes:
        """What a stream sends at its end if it is to include the usage."""
        return self._chunk_head + b'],"usage":%b}' % to_json(usage_body(usage))

    def whole(self, updates: Sequence[Update], usage: Usage) -> Json:
        """All of it at once: for each choice one update that is everything."""
        choices = [choice.whole(update) for choice, update in zip(self._choices, updates, strict=True)]
        return self._body(self.object, choices) | {"usage": usage_body(usage)}

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": choices}


class CompletionAnswer(Answer):
    """/v1/completions."""


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
