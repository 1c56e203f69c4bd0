"""Tool calls in a chat's messages, as chat templates want them (those in the output: tool_parser). Pure."""

from __future__ import annotations

import json
from typing import Any


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as objects: the API sends them as JSON text, and a template that
    writes them as JSON would quote that once more. What is not a JSON object stays as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
