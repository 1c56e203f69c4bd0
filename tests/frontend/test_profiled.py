"""A profiled model: token ids in, token ids out; whatever needs a tokenizer is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.model import read_configured_model
from tests.frontend_harness import Attempt, Served, expect_error, expected_keys, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    settings = {"model__path": "", "model__name": "", "model__profile": "ds-660b"}
    async with serve(None, engine_limit=100_000, **settings) as served:
        yield served


async def test_it_is_known_by_its_profile(served: Served) -> None:
    info = read_configured_model(served.frontend.config)
    assert (await served.http.get("/v1/models")).json()["data"][0]["id"] == "ds-660b"
    assert served.frontend.model.manifest == info.manifest
    assert served.cluster.registered[0].manifest == info.manifest


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_and_go(served: Served, stream: bool) -> None:
    vocab_size = served.frontend.model.vocab_size
    output = [vocab_size - 1, 0, 1, 2]

    async def script(attempt: Attempt) -> None:
        await attempt.output(output)

    served.cluster.script = script
    prompt = [vocab_size - 1, *range(200)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "hit_tokens": 128, "return_token_ids": True}
    if stream:
        events = await served.stream(**body)
        choices = [event["choices"][0] for event in events[:-1]]
    else:
        choices = (await served.complete(**body)).json()["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == output
    assert {choice["text"] for choice in choices} == {""}
    assert choices[-1]["finish_reason"] == "length", "no token ends a sequence of itself"
    request = served.cluster.requests[-1]
    assert request.tokens == prompt and request.hit_tokens == 128
    assert request.keys == expected_keys(served.frontend, request) and request.well_formed(64)


async def test_ids_out_of_the_vocabulary_are_refused(served: Served) -> None:
    vocab_size = served.frontend.model.vocab_size
    expect_error(await served.complete(prompt=[vocab_size]), "prompt", f"got {vocab_size} at index 0")


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": "hello"}),
        ("/v1/completions", "stop", {"prompt": [1, 2], "stop": "end"}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", "prompt", {"prompt": "hello"}),
        ("/detokenize", "tokens", {"tokens": [1, 2]}),
    ],
)
async def test_what_needs_a_tokenizer_is_refused(served: Served, path: str, param: str, body: dict[str, Any]) -> None:
    seen = len(served.cluster.requests)
    expect_error(await served.http.post(path, json=body), param, "'ds-660b' is a profiled model without a tokenizer")
    assert len(served.cluster.requests) == seen
