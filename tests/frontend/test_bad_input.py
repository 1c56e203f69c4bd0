"""Bad input: refused with the field, the limit and the actual value; nothing is dispatched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.frontend_harness import ENGINE_LIMIT, VOCAB_SIZE, Served, expect_error, serve, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One front end for all: it must be none the worse for what it refuses."""
    async with serve(write_model(tmp_path_factory.mktemp("frontend") / "tiny")) as served:
        yield served


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": []}, "prompt", ["at least 1 token", "got 0"]),
        ({"prompt": [[]]}, "prompt", ["at least 1 token"]),
        ({"prompt": ["a", 3]}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [[1], [True]]}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [[1], []]}, "prompt", ["at least 1 token"]),
        ({"prompt": ["a"] * 129}, "prompt", ["at most 128 prompts"]),
        ({"prompt": [[1], [2]], "hit_tokens": 1}, "hit_tokens", ["one prompt", "got 2"]),
        ({"prompt": 3}, "prompt", ["string or a list of token ids", "got 3"]),
        ({"prompt": None}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [1, "a"]}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [True]}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [1.5]}, "prompt", ["string or a list of token ids"]),
        ({"prompt": [5, -1]}, "prompt", ["0 to 299", "got -1 at index 1"]),
        ({"prompt": [5, VOCAB_SIZE]}, "prompt", ["0 to 299", "got 300"]),
        ({"prompt": [2**70]}, "prompt", ["0 to 299"]),
        ({"prompt": [5] * ENGINE_LIMIT}, "prompt", ["limited to 256", "prompt of 256"]),
        ({"prompt": "a" * 5000}, "prompt", ["limited to 256", "prompt of 5001"]),
        ({"prompt": [5] * 200, "max_tokens": 57}, "max_tokens", ["limited to 256", "leaves 56", "got 57"]),
        ({"prompt": [5] * 9, "hit_tokens": 10}, "hit_tokens", ["at most the prompt's length, which is 9", "got 10"]),
        ({"hit_tokens": -1}, "hit_tokens", ["greater than or equal to 0", "got -1"]),
        ({"hit_tokens": "8"}, "hit_tokens", ["valid integer"]),
        ({"max_completion_tokens": 500}, "max_completion_tokens", ["limited to 256", "got 500"]),
        ({"max_tokens": 0}, "max_tokens", ["greater than or equal to 1", "got 0"]),
        ({"max_tokens": "16"}, "max_tokens", ["valid integer", 'got "16"']),
        ({"max_tokens": 1.5}, "max_tokens", ["valid integer", "got 1.5"]),
        ({"max_tokens": True}, "max_tokens", ["valid integer"]),
        ({"min_tokens": 65}, "min_tokens", ["at most max_tokens, which is 64", "got 65"]),
        ({"min_tokens": -1}, "min_tokens", ["greater than or equal to 0"]),
        ({"temperature": 2.1}, "temperature", ["less than or equal to 2", "got 2.1"]),
        ({"temperature": -0.1}, "temperature", ["greater than or equal to 0"]),
        ({"top_p": 0}, "top_p", ["greater than 0", "got 0"]),
        ({"top_p": 1.01}, "top_p", ["less than or equal to 1"]),
        ({"top_k": -2}, "top_k", ["greater than or equal to -1"]),
        ({"seed": 2**63}, "seed", ["less than"]),
        ({"stop": ""}, "stop", ["1 to 1000 characters"]),
        ({"stop": ["a"] * 17}, "stop", ["at most 16 strings"]),
        ({"stop": [1]}, "stop", ["string or a list of strings"]),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", ["0 to 299", "got 300"]),
        ({"stream": "yes"}, "stream", ["valid boolean"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream is true"]),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["boolean"]),
        ({"n": 0}, "n", ["greater than or equal to 1"]),
        ({"n": 129}, "n", ["less than or equal to 128"]),
        ({"n": 65, "prompt": ["a", "b"]}, "n", ["2 prompts times n", "at most 128", "got 130"]),
        ({"best_of": 3}, "best_of", ["not supported"]),
        ({"logprobs": 21}, "logprobs", ["less than or equal to 20"]),
        ({"logprobs": True}, "logprobs", ["valid integer"]),
        ({"prompt_logprobs": 0}, "prompt_logprobs", ["not supported"]),
        ({"echo": True, "logprobs": 1}, "echo", ["log probabilities"]),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", ["-100 to 100"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ["token ids"]),
        ({"logit_bias": {"5": "1"}}, "logit_bias", ["numbers"]),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", ["0 to 299", "got 300"]),
        ({"suffix": "end"}, "suffix", ["not supported"]),
        ({"temprature": 0}, "temprature", ["not a field"]),
        ({"model": "other"}, "model", ["'other' does not exist", "'tiny'"]),
    ],
)
async def test_bad_completions_are_refused_and_nothing_is_dispatched(
    served: Served, body: dict[str, Any], param: str | None, words: list[str]
) -> None:
    response = await served.complete(**body)
    expect_error(response, param, *words, status=404 if param == "model" else 400)
    assert served.cluster.requests == []
    await served.ended()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": "hello"}, "messages", ["valid array"]),
        ({"messages": [{"content": "x"}]}, "messages.0.role", ["required"]),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content", ["string or a list of text parts"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            ["text"],
        ),
        ({"messages": [{"role": "martian", "content": "x"}]}, "messages", ["unknown role martian"]),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", ["limited to 256"]),
        ({"tools": "none"}, "tools", ["valid array"]),
        ({"tool_choice": "some"}, "tool_choice", ["'auto' or 'none'", 'got "some"']),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", ["valid boolean"]),
        ({"top_logprobs": 3}, "top_logprobs", ["logprobs is true"]),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["less than or equal to 20"]),
        ({"logprobs": 1}, "logprobs", ["valid boolean"]),
        ({"hit_tokens": 3}, "hit_tokens", ["not a field"]),
        ({"response_format": {"type": "json_object"}}, "response_format", ["not supported"]),
    ],
)
async def test_bad_chats_are_refused(served: Served, body: dict[str, Any], param: str, words: list[str]) -> None:
    expect_error(await served.chat(**body), param, *words)
    assert served.cluster.requests == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a", ', ["not JSON", "column"]),
        (b"", ["not JSON"]),
        (b"[1]", ["object"]),
        (b'{"prompt": "\\ud800"}', ["not JSON"]),
        (b'{"prompt": "\xff"}', ["not JSON"]),
        (b"[" * 5000, ["not JSON"]),
        (b'{"prompt": "a", "temperature": NaN}', ["finite"]),
    ],
)
async def test_broken_json_is_refused(served: Served, content: bytes, words: list[str]) -> None:
    response = await served.http.post("/v1/completions", content=content)
    expect_error(response, "temperature" if b"NaN" in content else None, *words)


async def test_a_body_over_the_limit_is_refused(served: Served) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(33):
            yield b"a" * (1 << 20)
        yield b'"}'

    expect_error(await served.http.post("/v1/completions", content=body()), None, "limited to", status=413)


async def test_unknown_paths_and_methods(served: Served) -> None:
    for path in ("/", "/v1", "/v1/completions/", "/v1/embeddings", "/docs"):
        expect_error(await served.http.post(path, json={}), None, path, status=404)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        response = await served.http.get(path)
        expect_error(response, None, "GET", path, status=405)
        assert response.headers["allow"] == "POST"
    expect_error(await served.http.get("/v1/models/other"), "model", "'other' does not exist", status=404)
