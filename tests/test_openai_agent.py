"""An agent, by the official client, on a real cluster: 20 turns of tool calls, and what each finds in storage.

The calls are in the plain format: the model's text is what the tool is called with, and the history has them as
tool_calls and tool messages. Hits come from the store alone; nothing ties one turn to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.engine.torch_backend.reference import Reference
from tests.models import tiny_model
from tests.test_frontend_cluster import serve

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.openai
BLOCK = 64
TURNS = 20
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model(tmp_path_factory.mktemp("models"), max_position_embeddings=8192)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def with_objects(messages: list[Any]) -> list[Any]:
    """As transformers' templates expect them: arguments are objects."""
    copy = json.loads(json.dumps(messages))
    for message in copy:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copy


@pytest.mark.timeout(600)
@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_twenty_turns(model: Path, reference: Reference, tmp_path: Path, read_side: str) -> None:
    template: Any = AutoTokenizer.from_pretrained(model)
    messages: list[Any] = [
        {"role": "system", "content": "you are a careful agent, and you call tools."},
        {"role": "user", "content": "find out what is the matter with this machine, step by step."},
    ]
    computed: list[list[int]] = []  # sequences whose KV a finished turn has left in storage, but for a partial block
    hits = []
    async with (
        serve(model, tmp_path, scheduler__read_side=read_side, prefill=2, decode=2) as (_, http),
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        name = (await client.models.list()).data[0].id
        for turn in range(TURNS):
            rendered = template.apply_chat_template(
                with_objects(messages), tools=[TOOL], add_generation_prompt=True, return_dict=False
            )
            answer = await client.chat.completions.create(
                model=name, messages=messages, tools=[TOOL], temperature=0, max_tokens=24,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            [choice] = answer.choices
            output = choice.token_ids
            assert answer.usage.prompt_tokens == len(rendered)
            assert output == reference.greedy(rendered, 24, [2])
            known = max((shared(rendered, sequence) for sequence in computed), default=0)
            expected = min(known, len(rendered) - 1) // BLOCK * BLOCK
            hits.append(answer.usage.prompt_tokens_details.cached_tokens)
            assert hits[-1] == expected, f"turn {turn}"
            computed.append((rendered + output)[:-1])
            command = choice.message.content
            call = {"id": f"call_{turn}", "type": "function"}
            function = {"name": "run", "arguments": json.dumps({"command": command})}
            messages.append({"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]})
            observed = blake2b(command.encode(), digest_size=16).hexdigest()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{observed} after turn {turn}"})
        prompts = len(rendered)
    assert hits[0] == 0 and hits == sorted(hits) and len(set(hits)) > TURNS / 2
    assert hits[-1] > 0.9 * prompts, "an agent's prompt is nearly all in storage"
    print(f"\ncached tokens: {hits} of {prompts}")
