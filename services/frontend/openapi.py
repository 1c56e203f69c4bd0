"""The OpenAPI document of the routes, out of the models that parse requests, for people and for tools that test. The
pages for operators (common.pages) are not in it."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/"
_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def _object(**properties: Any) -> dict[str, Any]:
    """All of them required; others may be there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(choice: dict[str, Any], kind: str) -> dict[str, Any]:
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        choices=_array(choice),
        usage={"$ref": REF + "Usage"},
    )


_REASON = _or_null({"enum": ["stop", "length", "tool_calls"]})
_CHOICE = {"index": _INTEGER, "logprobs": _or_null({"type": "object"}), "finish_reason": _REASON}
_FUNCTION = _object(name=_STRING, arguments=_STRING)
_CALL = _object(id=_STRING, type={"const": "function"}, function=_FUNCTION)
_MESSAGE = _object(role={"const": "assistant"}, content=_or_null(_STRING))
_MESSAGE["properties"]["tool_calls"] = _array(_CALL)
_MODEL = _object(id=_STRING, object={"const": "model"}, created=_INTEGER, owned_by=_STRING, max_model_len=_INTEGER)
ANSWERS: dict[str, dict[str, Any]] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_or_null(_STRING), code=_or_null(_STRING))),
    "Usage": _object(
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object(cached_tokens=_INTEGER),
    ),
    "Completion": _answer(_object(text=_STRING, **_CHOICE), "text_completion"),
    "ChatCompletion": _answer(_object(message=_MESSAGE, **_CHOICE), "chat.completion"),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_array({"$ref": REF + "Model"})),
    "Tokens": _object(tokens=_array(_INTEGER), count=_INTEGER, max_model_len=_INTEGER),
    "Text": _object(prompt=_STRING),
    "Health": _object(status={"const": "ok"}),
}
#: What every route may answer instead, and when.
FAILURES = {
    "400": "What is asked for is wrong or impossible; the message names the field",
    "401": "An API key is needed",
    "404": "There is no such model",
    "413": "The body is too large",
    "429": "The API key's tenant has too many requests in hand",
    "500": "A failure that another try may not have",
    "503": "Full, shutting down, or without engines: try again after Retry-After seconds",
    "504": "The request took too long",
}


@cache
def describe(model: str) -> dict[str, Any]:
    """The document. model: the name of the one that is served."""
    requests: list[type[BaseModel]] = [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]
    _, schemas = models_json_schema([(request, "validation") for request in requests], ref_template=REF + "{model}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dualpath",
            "version": "1",
            "description": f"The OpenAI API, and tokenize and detokenize as vLLM has them, for the model {model}.",
        },
        "paths": {
            "/v1/completions": {"post": _post("CompletionRequest", "Completion", streams=True)},
            "/v1/chat/completions": {"post": _post("ChatRequest", "ChatCompletion", streams=True)},
            "/tokenize": {"post": _post("TokenizeRequest", "Tokens")},
            "/detokenize": {"post": _post("DetokenizeRequest", "Text")},
            "/v1/models": {"get": _get("Models")},
            "/v1/models/{name}": {
                "get": {
                    **_get("Model"),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"const": model}}],
                }
            },
            "/health": {"get": _get("Health", security=False)},
        },
        "components": {
            "schemas": {**schemas["$defs"], **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(request: str, answer: str, streams: bool = False) -> dict[str, Any]:
    body = {"required": True, "content": _json(request)}
    return {"requestBody": body, **_get(answer, streams=streams)}


def _get(answer: str, security: bool = True, streams: bool = False) -> dict[str, Any]:
    content = _json(answer)
    if streams:
        content["text/event-stream"] = {"schema": _object(data=_STRING)}  # of each event
    failures = {status: {"description": why, "content": _json("Error")} for status, why in FAILURES.items()}
    responses = {"200": {"description": "What was asked for", "content": content}, **failures}
    return {"responses": responses, **({"security": [{}, {"key": []}]} if security else {})}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF + schema}}}
