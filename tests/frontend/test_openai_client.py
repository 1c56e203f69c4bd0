"""The official client, unchanged, against the API: what it parses, what it raises, what it tries again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.errors import DualPathError, ErrorCode
from common.types import FinishReason
from tests.frontend_harness import BOS, ENGINE_LIMIT, EOS, Attempt, Served, encode, serve, write_model

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.openai, pytest.mark.asyncio(loop_scope="module")]
KEYS = '[a]\nkeys = ["sk-right"]\n[few]\nkeys = ["sk-few"]\nmax_pending = 1\n'
TEXT = "Grüße 😀 an alle!"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("frontend")
    (directory / "keys.toml").write_text(KEYS)
    async with serve(write_model(directory / "tiny"), frontend__api_keys=str(directory / "keys.toml")) as served:
        yield served


def client_of(served: Served, key: str = "sk-right", **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=f"{served.frontend.url}/v1", api_key=key, **{"max_retries": 0, **options})


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[Any]:
    async with client_of(served) as client:
        yield client


async def test_models(client: Any) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "dualpath", ENGINE_LIMIT)
    assert await client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.models.retrieve("other")


async def test_a_completion(served: Served, client: Any) -> None:
    ids = served.says(TEXT, FinishReason.STOP, end=[EOS])
    answer = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=64, temperature=0.3, top_p=0.9, seed=7, n=2, logprobs=3, stop=["zzz"],
        logit_bias={"5": -3}, user="me", echo=False, extra_body={"top_k": 4, "min_tokens": 2, "ignore_eos": False},
    )  # fmt: skip
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert len(answer.choices[0].logprobs.tokens) == len(ids)
    assert answer.usage.completion_tokens == 2 * len(ids) and answer.usage.prompt_tokens == 6
    sampling = served.cluster.requests[-2].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.3, 0.9, 4, 7)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.logprobs) == (((5, -3.0),), 2, 3)


async def test_a_streamed_completion(served: Served, client: Any) -> None:
    served.says(TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="tiny", prompt=[BOS, *encode("hello")], max_tokens=64, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(encode(TEXT))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0


async def test_a_chat(served: Served, client: Any) -> None:
    served.says(TEXT)
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=64, logprobs=True, top_logprobs=2
    )
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "length")
    content = choice.logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(encode(TEXT))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat(served: Served, client: Any) -> None:
    served.says(TEXT)
    stream = await client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    entries = 0
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == {0: TEXT, 1: TEXT}
    assert chunk.usage.completion_tokens == entries == 2 * len(encode(TEXT))


async def test_the_clients_own_accumulation_of_a_stream(served: Served, client: Any) -> None:
    served.says(TEXT, FinishReason.STOP, end=[EOS])
    async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"


async def test_messages_of_every_role(served: Served, client: Any) -> None:
    served.says("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
    await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "list"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "etc usr"},
        ],
        tools=[{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}],
        tool_choice="auto",
    )
    prompt = served.frontend.model.tokenizer.decode(served.cluster.requests[-1].tokens)
    assert "system: be brief" in prompt and "user: list" in prompt and "tool: etc usr" in prompt
    assert '"name": "ls"' in prompt


async def test_the_request_id_is_on_answers_and_errors(served: Served, client: Any) -> None:
    served.says("x")
    answer = await client.completions.create(model="tiny", prompt="a")
    assert answer.id == f"cmpl-{answer._request_id}"
    headers = {"X-Request-Id": "mine"}
    answer = await client.completions.create(model="tiny", prompt="a", extra_headers=headers)
    assert answer._request_id == "mine"
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="tiny", prompt="a", max_tokens=10**6, extra_headers=headers)
    assert error.value.request_id == "mine"
    assert (error.value.param, error.value.code) == ("max_tokens", "context_length_exceeded")


async def test_errors_are_the_clients_own(served: Served, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="best_of"):
        await client.completions.create(model="tiny", prompt="a", best_of=3)
    async with client_of(served, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    served.cluster.refusal = DualPathError(ErrorCode.OVERLOADED, "full")
    try:
        with pytest.raises(openai.InternalServerError) as full:
            await client.completions.create(model="tiny", prompt="a")
        assert full.value.status_code == 503
    finally:
        served.cluster.refusal = None


async def test_a_limited_tenant_waits_and_tries_again(served: Served) -> None:
    """The client obeys Retry-After by itself."""
    go_on = asyncio.Event()

    async def script(attempt: Attempt) -> None:
        await go_on.wait()
        await attempt.output(encode("x"))

    served.cluster.script = script
    before = len(served.cluster.requests)
    async with client_of(served, "sk-few") as few, client_of(served, "sk-few", max_retries=2) as patient:
        first = asyncio.create_task(few.completions.create(model="tiny", prompt="a"))
        await served.cluster.until(lambda: len(served.cluster.requests) == before + 1)
        with pytest.raises(openai.RateLimitError):
            await few.completions.create(model="tiny", prompt="a")
        second = asyncio.create_task(patient.completions.create(model="tiny", prompt="a"))
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await first).choices[0].text == (await second).choices[0].text == "x"


async def test_a_stream_that_fails_raises(served: Served, client: Any) -> None:
    async def script(attempt: Attempt) -> None:
        attempt.tokens(encode("ab"))
        await asyncio.sleep(0.05)
        attempt.failed(ErrorCode.INTERNAL)

    served.cluster.script = script
    text = ""
    with pytest.raises(openai.APIError, match="as the script says"):
        async for chunk in await client.completions.create(model="tiny", prompt="a", stream=True):
            text += chunk.choices[0].text
    assert text == "ab"


async def test_a_stream_that_is_closed_cancels(served: Served, client: Any) -> None:
    async def script(attempt: Attempt) -> None:
        for index in range(60):
            attempt.tokens(encode("a"), index)
            await asyncio.sleep(0.01)

    served.cluster.script = script
    before = len(served.cluster.cancelled)
    stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await served.cluster.until(lambda: len(served.cluster.cancelled) == before + 1)
    await served.ended()


async def test_the_synchronous_client(served: Served) -> None:
    served.says(TEXT)

    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{served.frontend.url}/v1", api_key="sk-right", max_retries=0) as client:
            whole = client.completions.create(model="tiny", prompt="a", max_tokens=64).choices[0].text
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=64, stream=True)
            return whole, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == (TEXT, TEXT)
