"""Fields of the API whose values have several forms: what each takes, what it becomes, and how OpenAPI puts it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1_000
#: Sequences that one call may ask for: prompts times n.
MAX_SEQUENCES = 128
MAX_BIASED_TOKENS = 1_024
MAX_BIAS = 100
_TOKEN_ID = r"^[0-9]{1,9}$"


def _prompts(value: object) -> object:
    batch = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(batch) > MAX_SEQUENCES:
        raise ValueError(f"must be at most {MAX_SEQUENCES} prompts")
    for prompt in batch:
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) <= {int})):
            raise ValueError("must be a string or a list of token ids, or a list of such")
    return batch


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS or not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(re.fullmatch(_TOKEN_ID, str(token)) for token in value):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must have at most {MAX_BIASED_TOKENS} token ids")
    if not all(type(bias) in (int, float) and abs(bias) <= MAX_BIAS for bias in value.values()):
        raise ValueError(f"must have numbers from {-MAX_BIAS} to {MAX_BIAS}")
    return {int(token): float(bias) for token, bias in value.items()}


def _content(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('may only have parts of the form {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in value)


_NULL = {"type": "null"}
_PROMPT: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_NUMBER = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
_PART = {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),  # its only check: a prompt may have 10^5 token ids
    WithJsonSchema(
        {
            "anyOf": [
                *_PROMPT,
                {"type": "array", "items": {"anyOf": _PROMPT}, "minItems": 1, "maxItems": MAX_SEQUENCES},
            ]
        }
    ),
]
"""A text, token ids, or a list of such; always as a list."""

Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, _NULL]}),
]
"""Stop strings, none of them empty."""

Bias = Annotated[
    dict[int, float],
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": _TOKEN_ID},
                    "additionalProperties": _NUMBER,
                    "maxProperties": MAX_BIASED_TOKENS,
                },
                _NULL,
            ]
        }
    ),
]
"""What to add to the logits of tokens. The ids are strings, as all names in JSON are."""

Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", **_PART}}, _NULL]}),
]
"""The text of a message; text parts are joined by line ends."""
