"""Tool calls over HTTP: found where the request has tools and the model's template states their format, else text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.types import FinishReason
from tests.frontend_harness import EOS, Served, encode, events_of, expect_error, serve, write_tools_model

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TEXT = f"I look.\n{CALL}\n{OTHER}"
LIMIT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tools_model(tmp_path_factory.mktemp("frontend") / "tiny", LIMIT)


@pytest.fixture
async def served(model: Path) -> Any:
    async with serve(model, engine_limit=LIMIT) as served:
        served.says(TEXT, FinishReason.STOP, end=[EOS])
        yield served


def called(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


RUN, LOOK = ("function", "run", '{"command": "ls"}'), ("function", "look", "{}")


async def test_a_call_is_in_the_message(served: Served) -> None:
    body = (await served.chat(tools=TOOLS, tool_choice="auto")).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    assert called(choice["message"]) == [RUN, LOOK]
    assert body["usage"]["completion_tokens"] == len(encode(TEXT)) + 1
    served.says(CALL, FinishReason.STOP, end=[EOS])
    [choice] = (await served.chat(tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] is None and called(choice["message"]) == [RUN]


async def test_a_call_is_streamed_in_one_piece_and_never_as_text(served: Served) -> None:
    events = events_of((await served.chat(tools=TOOLS, stream=True)).text)
    choices = [event["choices"][0] for event in events[:-1]]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and called({"tool_calls": calls}) == [RUN, LOOK]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_every_call_has_an_id_of_its_own(served: Served) -> None:
    answers = [(await served.chat(tools=TOOLS, n=2)).json() for _ in range(2)]
    messages = [choice["message"] for answer in answers for choice in answer["choices"]]
    ids = [call["id"] for message in messages for call in message["tool_calls"]]
    assert len(ids) == len(set(ids)) == 8


async def test_without_parallel_calls_there_is_one(served: Served) -> None:
    answer = await served.chat(tools=TOOLS, parallel_tool_calls=False)
    assert called(answer.json()["choices"][0]["message"]) == [RUN]
    events = events_of((await served.chat(tools=TOOLS, parallel_tool_calls=False, stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert called({"tool_calls": [call for delta in deltas for call in delta.get("tool_calls", [])]}) == [RUN]


@pytest.mark.parametrize("asked", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_who_wants_no_calls_gets_text(served: Served, asked: dict[str, Any]) -> None:
    for stream in (False, True):
        response = await served.chat(**asked, stream=stream)
        choices = [event["choices"][0] for event in events_of(response.text)[:-1]] if stream else None
        if choices is None:
            [choice] = response.json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": TEXT}
        else:
            choice = choices[-1]
            assert "".join(each["delta"].get("content", "") for each in choices) == TEXT
        assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_is_text(served: Served) -> None:
    served.says(TEXT[:30], FinishReason.LENGTH)
    [choice] = (await served.chat(tools=TOOLS)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT[:30]} and choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "run"}}])
async def test_a_call_cannot_be_forced(served: Served, choice: Any) -> None:
    response = await served.chat(tools=TOOLS, tool_choice=choice)
    expect_error(response, "tool_choice", "'auto' or 'none'", json.dumps(choice))
    assert served.cluster.requests == []


async def test_the_next_turn_begins_with_what_the_model_has_seen_and_said(served: Served) -> None:
    """So that its KV is found in storage."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    message = (await served.chat(messages=messages, tools=TOOLS)).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "etc"} for call in message["tool_calls"]]
    await served.chat(messages=[*messages, message, *results], tools=TOOLS)
    first, second = (request.tokens for request in served.cluster.requests)
    assert second[: len(first)] == first
    assert second[len(first) :][: len(encode(TEXT))] == encode(TEXT)


async def test_a_template_without_the_format_leaves_text(tmp_path: Path) -> None:
    model = write_tools_model(tmp_path / "other", LIMIT)
    template = (model / "chat_template.jinja").read_text().replace("<tool_call>", "<call>")
    (model / "chat_template.jinja").write_text(template)
    async with serve(model, engine_limit=LIMIT) as served:
        served.says(TEXT, FinishReason.STOP, end=[EOS])
        [choice] = (await served.chat(tools=TOOLS)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT} and choice["finish_reason"] == "stop"
