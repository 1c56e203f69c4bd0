"""An agent by the official client: it calls the tools that the model asks for, until the model says that it is done."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.types import FinishReason
from tests.frontend_harness import EOS, Attempt, Served, encode, serve, write_tools_model

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.openai
LIMIT = 4096
FILES = {"/": "etc", "/etc": "hosts", "/etc/hosts": "localhost"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "What is in a directory or a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def call_of(path: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"path": "{path}"}}}}\n</tool_call>'


#: What the model says, turn by turn.
SAID = ["I begin at the root.\n" + call_of("/"), call_of("/etc") + "\n" + call_of("/etc/hosts"), "It is localhost."]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async def script(attempt: Attempt) -> None:
        said = SAID[(len(served.cluster.requests) - 1) % len(SAID)]
        await attempt.output([*encode(said), EOS], FinishReason.STOP)

    async with serve(write_tools_model(tmp_path / "tiny", LIMIT), engine_limit=LIMIT) as served:
        served.cluster.script = script
        yield served


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_calls_tools(served: Served, stream: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Which host?"}]
    looked = []
    async with openai.AsyncOpenAI(base_url=f"{served.frontend.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        while True:
            asked: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [TOOL], "temperature": 0}
            if stream:
                async with chat.stream(**asked) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await chat.create(**asked)
            [choice] = answer.choices
            messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls:
                assert (call.type, call.function.name) == ("function", "look")
                looked.append(json.loads(call.function.arguments)["path"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": FILES[looked[-1]]})
    assert looked == ["/", "/etc", "/etc/hosts"]
    assert choice.finish_reason == "stop" and choice.message.content == "It is localhost."
    assert messages[2]["content"] == "I begin at the root."
    prompt = served.frontend.model.tokenizer.decode(served.cluster.requests[-1].tokens)
    assert all(said in prompt for said in SAID[:2]), "as it was said"
    assert prompt.count("localhost") == 1 and "Be exact." in prompt and '"name": "look"' in prompt
