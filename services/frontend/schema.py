"""The requests of the OpenAI API, with the extensions that vLLM's clients use. Types are exact: "16" is not a number.

A field that we do not have is refused unless it cannot change the answer: an answer that silently ignores what was
asked for is worse than none.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from services.frontend.errors import ApiError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1_000
#: Fields that change nothing in the answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
#: The values of fields we do not implement that ask for what we do anyway. None always does.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}


def _prompt(value: object) -> object:
    """A string or token ids; a batch of one is that one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"must be one prompt, not a batch of {len(value)}: send one request for each")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int}):
        return value
    raise ValueError("must be a string or a list of token ids")


def _stop(value: object) -> object:
    """Stop strings, none of them empty."""
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS or not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _content(value: object) -> object:
    """The text of a message; text parts are joined by line ends."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('may only have parts of the form {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in value)


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
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions.

    hit_tokens, ours: a client that replays agents knows how much of the prompt its earlier turns have put in storage
    (paper §7); given that, the scheduler asks nobody. A block that is not there after all is computed.
    """

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]  # its only check: a prompt may have 10^5 token ids
    hit_tokens: Annotated[int, Field(ge=0)] | None = None


class Message(_Model):
    """One message of a chat. What else it has (name, tool_calls ...) is the chat template's business."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[str | None, BeforeValidator(_content)] = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None


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
    """True if the value asks for nothing. 0 is not False: logprobs 0 asks for something."""
    return any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in NEUTRAL.get(name, ()))


def _excerpt(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
