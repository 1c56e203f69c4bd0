"""Tool calls in the text of models that write them as Hermes and Qwen do: <tool_call>{"name", "arguments"}</tool_call>.

Pure. What is certain to be content is released at once; what may still become a call is held back, as part of a stop
string is. What turns out to be no call is content, to the letter.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NoReturn

BEGIN, END = "<tool_call>", "</tool_call>"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolParser:
    """Of one output, however it is cut. White space in front of a call belongs to it, and so does what is left at the
    end: a chat template writes its own."""

    def __init__(self) -> None:
        self._held = ""  # white space and part of BEGIN, or BEGIN and all that follows
        self._after_call = False  # there has been no content since

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content, and the calls, that this text completes."""
        text = self._held + text
        content = ""
        calls = []
        while (begin := text.find(BEGIN)) >= 0 and (end := _end(text, begin + len(BEGIN))) >= 0:
            call = _parse(text[begin + len(BEGIN) : end])
            end += len(END)
            if call is not None:
                calls.append(call)
            content += text[:end] if call is None else text[:begin].rstrip()
            self._after_call = call is not None
            text = text[end:]
        sure = len(text[: begin if begin >= 0 else _first_part(text, BEGIN)].rstrip())
        self._held = text[sure:]
        self._after_call = self._after_call and not sure
        return content + text[:sure], calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back. A call that only lacks its end counts."""
        text, self._held = self._held, ""
        before, begin, inside = text.partition(BEGIN)
        call = _parse(inside[: _first_part(inside, END)]) if begin else None
        if call is not None:
            return before.rstrip(), [call]
        return "" if self._after_call and not text.strip() else text, []


def _end(text: str, begin: int) -> int:
    """Where the first END is that is in no JSON string; -1: not yet."""
    end = text.find(END, begin)
    while end >= 0 and '"' in STRING.sub("", text[begin:end]):
        end = text.find(END, end + len(END))
    return end


def _first_part(text: str, tag: str) -> int:
    """Where a part of the tag at the end of the text starts."""
    part = next(size for size in range(len(tag) - 1, -1, -1) if text.endswith(tag[:size]))
    return len(text) - part


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text, parse_constant=_refuse)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        found = ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        (found.name + found.arguments).encode()  # escapes may spell what is no Unicode
    except (ValueError, RecursionError):
        return None
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
