"""Several sequences in one call: n, several prompts, seeds, what each costs, and what one failure means for all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.errors import ErrorCode
from tests.frontend_harness import BOS, Attempt, Served, encode, events_of, expect_error, serve


async def repeats(attempt: Attempt) -> None:
    """Says the prompt again, and then its seed."""
    prompt = [token for token in attempt.request.tokens if token != BOS]
    attempt.started(cached=len(prompt))
    await attempt.output(prompt + encode(f" {attempt.request.sampling.seed}"))


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_prompt_by_prompt_each_with_a_seed_of_its_own(served: Served, stream: bool) -> None:
    served.cluster.script = repeats
    options: dict[str, Any] = {"prompt": ["a", "bé"], "n": 3, "seed": 2**63 - 2, "return_token_ids": True}
    if stream:
        *chunks, usage, done = await served.stream(**options, stream_options={"include_usage": True})
        assert done == "[DONE]" and usage["choices"] == []
        choices: list[dict[str, Any]] = [{"text": "", "ids": [], "reasons": []} for _ in range(6)]
        for chunk in chunks:
            [choice] = chunk["choices"]
            one = choices[choice["index"]]
            one["text"] += choice["text"]
            one["ids"] += choice["token_ids"]
            one["reasons"].append(choice["finish_reason"])
        assert all(one["reasons"] == [None] * (len(one["reasons"]) - 1) + ["length"] for one in choices)
        texts, ids, usage = [one["text"] for one in choices], [one["ids"] for one in choices], usage["usage"]
    else:
        body = (await served.complete(**options)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        texts, ids = zip(*((choice["text"], choice["token_ids"]) for choice in body["choices"]), strict=True)
        usage = body["usage"]
    seeds = [2**63 - 2, 2**63 - 1, 0]
    assert list(texts) == [f"{prompt} {seed}" for prompt in ("a", "bé") for seed in seeds]
    assert list(ids) == [encode(text) for text in texts]
    # each prompt counts once, all output counts
    assert usage["prompt_tokens"] == 2 + 4 and usage["prompt_tokens_details"]["cached_tokens"] == 1 + 3
    assert usage["completion_tokens"] == sum(len(encode(text)) for text in texts)
    assert len({request.request_id for request in served.cluster.requests}) == 6
    await served.ended()


async def test_a_chat_has_choices_too(served: Served) -> None:
    served.says("fine")
    body = (await served.chat(n=2)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["fine", "fine"]
    events = events_of((await served.chat(n=2, stream=True)).text)
    for index in (0, 1):
        deltas = [event["choices"][0]["delta"] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
        assert "".join(delta.get("content", "") for delta in deltas) == "fine"


async def test_continuous_usage_counts_all_choices(served: Served) -> None:
    served.says("abc")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.stream(n=2, max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {6}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_ends_all(served: Served, stream: bool) -> None:
    async def script(attempt: Attempt) -> None:
        if attempt.request.request_id.endswith("-1"):
            await asyncio.sleep(0.05)
            attempt.failed(ErrorCode.INTERNAL)
        else:
            attempt.tokens(encode("ab"))

    served.cluster.script = script
    response = await served.complete(n=3, stream=stream)
    if stream:
        assert events_of(response.text)[-1]["error"]["code"] == "internal"
    else:
        expect_error(response, None, "as the script says", status=500)
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 2)
    await served.ended()


async def test_a_client_that_leaves_cancels_every_choice(served: Served) -> None:
    async def script(attempt: Attempt) -> None:
        attempt.tokens(encode("ab"))

    served.cluster.script = script
    body = {"prompt": "hello", "max_tokens": 64, "n": 4, "stream": True}
    async with served.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 4)
    await served.ended()


async def test_each_choice_has_a_stop_string_of_its_own(served: Served) -> None:
    async def script(attempt: Attempt) -> None:
        first = not attempt.request.request_id.endswith("-1")
        await attempt.output(encode("so far END so good" if first else "EN passant"))

    served.cluster.script = script
    body = (await served.complete(n=2, stop="END")).json()
    assert [choice["text"] for choice in body["choices"]] == ["so far ", "EN passant"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


async def test_choices_take_places(model: Path) -> None:
    """All or none: a call that does not fit is refused as a whole."""
    async with serve(model, frontend__max_pending=3) as served:
        served.says("x")
        refused = await served.complete(n=4)
        expect_error(refused, None, "3 requests are in hand", status=503)
        assert served.cluster.requests == [] and "retry-after" in refused.headers
        assert (await served.complete(n=3)).status_code == 200
        await served.ended()
        assert served.metric("requests_in_hand") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(served: Served, stream: bool) -> None:
    """The prompt's text stands in front of each choice; its tokens are not generated, and not counted as such."""
    served.says(" world")
    options: dict[str, Any] = {"prompt": ["hello", [BOS, *encode("good"), 3]], "echo": True, "return_token_ids": True}
    if stream:
        texts = ["", ""]
        for event in (await served.stream(**options))[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        body = (await served.complete(**options)).json()
        texts = [choice["text"] for choice in body["choices"]]
        assert body["choices"][0]["token_ids"] == encode(" world")
        assert body["usage"]["completion_tokens"] == 12
    assert texts == ["hello world", "good! world".replace("!", served.frontend.model.tokenizer.decode([3]))]
