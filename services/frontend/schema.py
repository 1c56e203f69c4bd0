"""The requests of the OpenAI API, with the extensions that vLLM's clients use. Types are exact: "16" is not a number.

A field that we do not have is refused unless it cannot change the answer: an answer that silently ignores what was
asked for is worse than none.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.frontend.errors import ApiError
from services.frontend.fields import MAX_SEQUENCES, Bias, Content, Prompts, Stops

#: Alternatives that may be asked for with each token.
MAX_LOGPROBS = 20
#: Fields that change nothing in the answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
#: The values of fields we do not implement that ask for what we do anyway. None always does.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)


class StreamOptions(_Model):
    """What a stream carries besides the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Model):
    """What both ways of asking have in common. None is "not given"."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Bias = {}
    stop: Stops = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens go, with their log probabilities, with each token; None: not even its own does."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """POST /v1/completions.

    hit_tokens, ours: a client that replays agents knows how much of the prompt its earlier turns have put in storage
    (paper §7); given that, the scheduler asks nobody. A block that is not there after all is computed.
    """

    prompt: Prompts
    hit_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(_Model):
    """One message of a chat. What else it has (name, tool_calls ...) is the chat template's business."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Content = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions.

    tools: for the chat template. Calls in the output are told apart from content unless tool_choice is "none"; the
    model is not forced to any ("required", or one by name). parallel_tool_calls false: after the first one they are
    left out.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Model):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(_Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse(schema: type[Body], body: bytes) -> Body:
    """A request from its JSON. ApiError names the first field that is wrong, what is allowed, and what was sent."""
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            raise ApiError(f"the body is not JSON: {message}") from None
        if first["type"] != "missing":
            message += f", got {_excerpt(first['input'])}"
        raise ApiError(f"{where or 'body'}: {message}", where or None) from None
    for name, value in (request.model_extra or {}).items():
        if value is None or name in IGNORED or _neutral(name, value):
            continue
        known = "is not supported here" if name in NEUTRAL else "is not a field of this request"
        raise ApiError(f"{name}: {known}, got {_excerpt(value)}", name)
    return request


def _neutral(name: str, value: object) -> bool:
    """True if the value asks for nothing. 0 is not False: prompt_logprobs 0 asks for something."""
    return any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in NEUTRAL.get(name, ()))


def _excerpt(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
