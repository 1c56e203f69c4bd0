"""The HTTP surface over real sockets: answers, streams, the other routes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.types import FinishReason, Role
from tests.frontend_harness import (
    BOS,
    ENGINE_LIMIT,
    EOS,
    Served,
    encode,
    events_of,
    expected_keys,
    serve,
    text_of,
)

TEXT = "Grüße 😀 an alle!"


# ---- answers -------------------------------------------------------------------------------------------------------


async def test_a_completion(served: Served) -> None:
    ids = served.says(TEXT)
    response = await served.complete(max_tokens=len(ids), return_token_ids=True)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert choice == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length", "token_ids": ids}
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": len(ids),
        "total_tokens": 6 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    [request] = served.cluster.requests
    assert request.tokens == [BOS, *encode("hello")]
    assert (request.attempt, request.num_generated) == (0, 0)
    assert request.keys == expected_keys(served.frontend, request)
    assert served.cluster.cancelled == []


async def test_block_keys_go_with_the_prompt(served: Served) -> None:
    served.says("x")
    await served.complete(prompt=[7] * 130, max_tokens=1)
    [request] = served.cluster.requests
    assert len(request.block_keys) == 2
    assert request.keys == expected_keys(served.frontend, request)


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [BOS, *encode("hello")], [[BOS, *encode("hello")]]])
async def test_a_prompt_is_text_or_tokens_or_a_batch_of_one(served: Served, prompt: Any) -> None:
    served.says("ok")
    assert (await served.complete(prompt=prompt, max_tokens=2)).status_code == 200
    assert served.cluster.requests[0].tokens == [BOS, *encode("hello")]


async def test_a_stream_is_the_completion_in_pieces(served: Served) -> None:
    ids = served.says(TEXT)
    asked = {"max_tokens": len(ids), "return_token_ids": True}
    whole = (await served.complete(**asked)).json()
    events = await served.stream(**asked, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert text_of(chunks) == whole["choices"][0]["text"] == TEXT
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    # a chunk has what there was to tell, also where its text waits for the rest of a character
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert min(counts[:-1]) > 0 and counts[-1] == 0
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_tokens_are_sent_as_they_come(served: Served) -> None:
    more = asyncio.Event()

    async def script(attempt: Any) -> None:
        attempt.tokens(encode("a"))
        await more.wait()
        await asyncio.sleep(0)
        attempt.tokens(encode("bc"), index=1)
        attempt.finished(3)

    served.cluster.script = script
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    async with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "a"
        more.set()
        rest = [json.loads(line[6:])["choices"][0] async for line in lines if line.startswith("data: {")]
    assert [choice["text"] for choice in rest] == ["bc", ""]


async def test_continuous_usage(served: Served) -> None:
    served.says("abc")
    events = await served.stream(stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=3)
    *chunks, usage, _ = events
    told = [len(text_of(chunks[: number + 1])) for number in range(len(chunks))]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == told
    assert usage["usage"]["completion_tokens"] == told[-1] == 3


async def test_a_chat(served: Served) -> None:
    served.says("fine")
    body = (await served.chat(max_completion_tokens=9)).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "fine"}
    [request] = served.cluster.requests
    assert request.tokens == [BOS, *encode("user: hello\n"), BOS, *encode("assistant:")], "one BOS, the template's"
    assert request.sampling.max_tokens == 9
    events = events_of((await served.chat(stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"]
    assert "".join(delta.get("content", "") for delta in deltas) == "fine" and deltas[-1] == {}
    assert all("role" not in delta for delta in deltas[1:])


async def test_a_chat_may_use_the_rest_of_the_context(served: Served) -> None:
    served.says("x")
    await served.chat()
    [request] = served.cluster.requests
    assert request.sampling.max_tokens == ENGINE_LIMIT - request.num_tokens


async def test_text_parts_and_tools_reach_the_template(served: Served) -> None:
    served.says("x")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await served.chat(messages=[{"role": "user", "content": parts, "name": "me"}], tools=[{"type": "function"}])
    prompt = served.frontend.model.tokenizer.decode(served.cluster.requests[0].tokens)
    assert prompt == 'user: a\nb\ntools: [{"type": "function"}]\nassistant:'


async def test_sampling_parameters(served: Served) -> None:
    served.says("x")
    await served.complete(
        max_tokens=20, min_tokens=3, temperature=0.5, top_p=0.9, top_k=-1, seed=-1, stop_token_ids=[9], ignore_eos=True
    )
    await served.complete(prompt="x", max_tokens=None)
    await served.complete(prompt="x", temperature=0, stop=None, stream=None, user="me", n=1, logprobs=None)
    first, second, third = (request.sampling for request in served.cluster.requests)
    assert (first.max_tokens, first.min_tokens, first.temperature, first.top_p) == (20, 3, 0.5, 0.9)
    assert (first.top_k, first.seed, first.stop_token_ids, first.ignore_eos) == (0, 2**63 - 1, (9,), True)
    assert (second.max_tokens, second.temperature, second.top_p, second.ignore_eos) == (16, 1.0, 1.0, False)
    assert third.temperature == 0
    assert second.seed != third.seed, "without a seed every request draws its own"


async def test_the_default_length_shrinks_near_the_limit(served: Served) -> None:
    served.says("x")
    body = {"prompt": [5] * (ENGINE_LIMIT - 3)}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    assert served.cluster.requests[0].sampling.max_tokens == 3


async def test_the_end_token_is_counted_and_not_shown(served: Served) -> None:
    ids = served.says("abc", FinishReason.STOP, end=[EOS])
    body = (await served.complete(return_token_ids=True)).json()
    assert body["choices"][0]["text"] == "abc" and body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["token_ids"] == ids and body["usage"]["completion_tokens"] == 4


async def test_a_stop_token_is_not_shown_even_if_it_is_text(served: Served) -> None:
    served.says("abc", FinishReason.STOP)
    body = (await served.complete(stop_token_ids=encode("c"))).json()
    assert body["choices"][0]["text"] == "ab" and body["usage"]["completion_tokens"] == 3
    served.says("cab", FinishReason.LENGTH)
    body = (await served.complete(stop_token_ids=encode("c"), min_tokens=2)).json()
    assert body["choices"][0]["text"] == "cab", "a stop token among the first min_tokens is text"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_three_tokens(served: Served, stream: bool) -> None:
    ids = served.says("some text END and more that nobody sees")
    events: list[Any] = []
    if stream:
        events = await served.stream(stop="END", return_token_ids=True)
        assert events[-1] == "[DONE]"
        assert "E" not in text_of(events)
        choices = [event["choices"][0] for event in events[:-1]]
    else:
        choices = (await served.complete(stop=["END", "zzz"], return_token_ids=True)).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "some text "
    assert choices[-1]["finish_reason"] == "stop"
    assert [token for choice in choices for token in choice["token_ids"]] == ids[:13]
    request_id = served.cluster.requests[0].request_id
    await served.cluster.until(lambda: served.cluster.cancelled in ([], [(request_id, 0)]))
    await served.ended()


async def test_a_stop_string_cancels_what_still_runs(served: Served) -> None:
    async def script(attempt: Any) -> None:
        attempt.tokens(encode("abSTOP"))

    served.cluster.script = script
    body = (await served.complete(stop="STOP")).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "stop")
    await served.cluster.until(lambda: served.cluster.cancelled == [(served.cluster.requests[0].request_id, 0)])


async def test_a_near_miss_of_a_stop_string_is_shown_in_full(served: Served) -> None:
    served.says("some ENough EN")
    events = await served.stream(stop="END")
    assert text_of(events) == "some ENough EN"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_request_id_is_taken_over(served: Served) -> None:
    served.says("x")
    for _ in range(2):
        response = await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"].startswith("cmpl-mine-")
    first, second = served.cluster.requests
    assert first.request_id != second.request_id
    response = await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "a b;{}"})
    assert response.headers["x-request-id"] in response.json()["id"], "what is no plain name is not taken over"


async def test_many_clients_at_once(model: Path) -> None:
    async def script(attempt: Any) -> None:
        await attempt.output([token for token in attempt.request.tokens if token != BOS])

    async with serve(model, timeouts__call_s=10.0) as served:
        served.cluster.script = script
        prompts = [f"client {i} says 😀" for i in range(60)]
        streams = await asyncio.gather(*(served.stream(prompt=prompt) for prompt in prompts))
        assert [text_of(events) for events in streams] == prompts
        await served.ended()


# ---- the other routes ----------------------------------------------------------------------------------------------


async def test_models(served: Served) -> None:
    [model] = (await served.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", ENGINE_LIMIT)


async def test_tokenize_and_back(served: Served) -> None:
    body = (await served.http.post("/tokenize", json={"prompt": TEXT})).json()
    assert body == {"tokens": [BOS, *encode(TEXT)], "count": len(encode(TEXT)) + 1, "max_model_len": ENGINE_LIMIT}
    bare = (await served.http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})).json()
    assert bare["tokens"] == encode(TEXT)
    back = await served.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": f"<s>{TEXT}"}
    long = "many words " * 20_000
    assert (await served.http.post("/tokenize", json={"prompt": long})).json()["count"] == len(long) + 1


async def test_health_follows_the_engines(served: Served) -> None:
    assert (await served.http.get("/health")).status_code == 200
    decode = next(member for member in served.cluster.members if member.role is Role.DECODE)
    served.cluster.left(decode)
    while (response := await served.http.get("/health")).status_code == 200:
        await asyncio.sleep(0.01)
    assert response.status_code == 503 and response.json()["error"]["message"] == "no live decode engine"
    served.cluster.joined(replace(decode, incarnation="decode.2"))
    while (await served.http.get("/health")).status_code != 200:
        await asyncio.sleep(0.01)


async def test_the_pages_of_every_process_are_here_too(served: Served) -> None:
    assert (await served.http.get("/live")).json() == {"status": "ok"}
    assert (await served.http.get("/ready")).json() == {"status": "ok", "reason": None}
    metrics = await served.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert "\ndualpath_requests_in_hand 0.0\n" in metrics.text
    for member in served.cluster.members:
        served.cluster.left(member)
    while (response := await served.http.get("/ready")).status_code == 200:
        await asyncio.sleep(0.01)
    assert response.status_code == 503 and response.json()["status"] == "no_engines"
    assert (await served.http.get("/live")).status_code == 200
