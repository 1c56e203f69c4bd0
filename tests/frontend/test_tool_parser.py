"""Tool calls are found in a model's text however it is cut; what is none stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.tool_parser import ToolCall, ToolParser

CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
RUN = ToolCall("run", '{"command": "ls"}')
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    CALL,
    " ",
    "\n",
    "<",
    "<tool",
    "text",
    "}",
]


def parse(pieces: Iterable[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolParser()
    content, calls = "", []
    for piece in pieces:
        new, found = parser.push(piece)
        content += new
        calls += found
    new, found = parser.finish()
    return content + new, calls + found


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [RUN]),
        (f"I look.\n\n{CALL}\n{CALL}\n", "I look.", [RUN, RUN]),
        (f"{CALL}\nand then", "\nand then", [RUN]),
        (f"one {CALL} two {CALL}", "one two", [RUN, RUN]),
        (CALL.removesuffix("</tool_call>"), "", [RUN]),
        (CALL.removesuffix("_call>"), "", [RUN]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "a\\"</tool_call>b"}}</tool_call>',
            "",
            [ToolCall("f", '{"x": "a\\"</tool_call>b"}')],
        ),
        (f"{CALL}\n<tool_call>x</tool_call>", "\n<tool_call>x</tool_call>", [RUN]),
        (f"<tool_call>x</tool_call> {CALL}", "<tool_call>x</tool_call>", [RUN]),
        (
            '<tool_call>{"id": 7, "arguments": {"text": "ü😀", "n": [1.50, null]}, "name": "f"}</tool_call>',
            "",
            [ToolCall("f", '{"text": "ü😀", "n": [1.5, null]}')],
        ),
    ],
)
def test_calls_worked_by_hand(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parse([text]) == parse(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain \n ",
        "1 < 2 and <tool_cal l> ",
        "the end <tool_call",
        "<tool_call>",
        CALL[:-20],
        "</tool_call>",
        " <tool_call>no JSON</tool_call>\n",
        "<tool_call><function=run><parameter=command>ls</parameter></function></tool_call>",
        '<tool_call>["run", {}]</tool_call>',
        '<tool_call>{"name": "run"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "run", "arguments": "ls"}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"n": NaN}}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"n": 1e999}}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"text": "no end}}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"text": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text: str) -> None:
    assert parse([text]) == (text, [])
    assert parse(text[at : at + 7] for at in range(0, len(text), 7)) == (text, [])


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.data())
def test_any_cut_gives_the_same(text: str, data: st.DataObject) -> None:
    whole = parse([text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces) == parse(text) == whole
    content, calls = whole
    assert calls or content == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_content_does_not_wait_for_what_cannot_become_a_call() -> None:
    parser = ToolParser()
    assert parser.push("some text") == ("some text", [])
    assert parser.push(" <tool_") == ("", [])
    assert parser.push("box>") == (" <tool_box>", [])
    assert parser.push(CALL[:-1]) == ("", [])
    assert parser.push(">") == ("", [RUN]), "at once, not at the end"
