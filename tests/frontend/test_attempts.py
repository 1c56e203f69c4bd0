"""The life of a client request through lost attempts, up to its deadline."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import DualPathError, ErrorCode
from services.frontend.client_request import REFUSED_PAUSE_S, ClientRequest
from tests.frontend_harness import (
    BOS,
    EOS,
    Attempt,
    Served,
    encode,
    events_of,
    expect_error,
    expected_keys,
    serve,
    text_of,
)

TEXT = "ab😀cd"


def loses(code: ErrorCode, after: int, times: int = 1) -> Any:
    """A script: the first attempts deliver so many more tokens of TEXT and are lost; the next one goes to the end."""
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        done = attempt.request.num_generated
        if attempt.request.attempt < times:
            attempt.tokens(ids[done : done + after])
            await asyncio.sleep(0.2)
            attempt.failed(code)
        else:
            await attempt.output(ids[done:])

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_attempt_goes_on_where_it_was(served: Served, stream: bool) -> None:
    served.cluster.script = loses(ErrorCode.ENGINE_LOST, after=3)  # in the middle of the emoji
    response = await served.complete(stream=stream, return_token_ids=True, max_tokens=8)
    choices = [event["choices"][0] for event in events_of(response.text)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [token for choice in choices for token in choice["token_ids"]] == encode(TEXT)
    first, second = served.cluster.requests
    assert second.request_id == first.request_id and second.attempt == first.attempt + 1 == 1
    assert second.tokens == [BOS, *encode("hello"), *encode(TEXT)[:3]]
    assert second.num_generated == 3 and second.max_new_tokens == 5
    assert second.sampling == first.sampling, "the seed too"
    assert second.keys == expected_keys(served.frontend, second)
    assert served.cluster.cancelled == [], "the scheduler has ended that attempt itself"
    assert served.metric("retries_total{code=engine_lost}") == 1


async def test_usage_counts_each_token_once_and_the_first_attempts_hits(served: Served) -> None:
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        done = attempt.request.num_generated
        attempt.started(cached=64 * attempt.request.attempt + 5)
        attempt.tokens(ids[done : done + 3])
        await asyncio.sleep(0.2)
        if done + 3 < len(ids):
            attempt.failed(ErrorCode.ENGINE_LOST)
        else:
            attempt.finished(len(ids))

    served.cluster.script = script
    usage = (await served.complete()).json()["usage"]
    assert usage["prompt_tokens"] == 6 and usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5


async def test_attempts_are_bounded(served: Served) -> None:
    served.cluster.script = loses(ErrorCode.TRANSFER_FAILED, after=0, times=99)
    expect_error(await served.complete(), None, "as the script says", status=500)
    assert [request.attempt for request in served.cluster.requests] == [0, 1, 2]


async def test_preemption_is_no_failure(served: Served) -> None:
    served.cluster.script = loses(ErrorCode.PREEMPTED, after=1, times=6)
    assert (await served.complete()).json()["choices"][0]["text"] == TEXT
    assert len(served.cluster.requests) == 7


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.BAD_REQUEST, ErrorCode.MISMATCH])
async def test_what_another_attempt_would_not_change_is_not_retried(served: Served, code: ErrorCode) -> None:
    served.cluster.script = loses(code, after=0, times=99)
    response = await served.complete()
    assert response.status_code == (400 if code is ErrorCode.BAD_REQUEST else 500)
    assert response.json()["error"]["code"] == code.value
    assert len(served.cluster.requests) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_what_has_failed_is_freed_without_a_collection(served: Served, n: int) -> None:
    """Full collections wait for a calm moment (common.collector): prompts must not wait with them."""
    served.cluster.script = loses(ErrorCode.INTERNAL, after=0, times=99)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await served.complete(n=n)).status_code == 500
        await served.ended()
        kept = [each for each in gc.get_objects() if isinstance(each, ClientRequest)]
    finally:
        gc.enable()
    assert kept == []


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"stream": True}])
async def test_what_is_over_its_deadline_is_freed_without_a_collection(model: Path, body: dict[str, Any]) -> None:
    async def script(attempt: Attempt) -> None:
        attempt.tokens(encode("a"))

    async with serve(model, timeouts__request_s=0.2) as served:
        served.cluster.script = script
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert "deadline" in (await served.complete(**body)).text
            await served.ended()
            kept = [each for each in gc.get_objects() if isinstance(each, ClientRequest)]
        finally:
            gc.enable()
        assert kept == []


async def test_a_stream_that_has_begun_ends_with_an_error_event(served: Served) -> None:
    served.cluster.script = loses(ErrorCode.INTERNAL, after=2, times=99)
    events = await served.stream(stream_options={"include_usage": True})
    assert text_of(events[:-1]) == "ab"
    assert events[-1] == {
        "error": {"message": "as the script says", "type": "server_error", "param": None, "code": "internal"}
    }
    await served.ended()
    assert served.metric("requests_total{outcome=internal}") == 1


async def test_a_scheduler_that_does_not_answer_is_tried_again_and_told_to_stop(model: Path) -> None:
    async with serve(model, frontend__max_attempts=2, timeouts__call_s=0.1) as served:
        served.says(TEXT)
        await served.cluster.scheduler.close()
        expect_error(await served.complete(), None, "did not answer Submit", status=503)


async def test_messages_of_an_older_attempt_are_dropped(served: Served) -> None:
    ids = encode(TEXT)
    old: list[Attempt] = []

    async def script(attempt: Attempt) -> None:
        if attempt.request.attempt == 0:
            old.append(attempt)
            attempt.tokens(ids[:2])
            await asyncio.sleep(0.2)
            attempt.failed(ErrorCode.ENGINE_LOST)
            return
        old[0].tokens(encode("XXXX"), index=2)
        old[0].started(99)
        old[0].finished(2)
        old[0].failed(ErrorCode.INTERNAL)
        await asyncio.sleep(0.2)
        await attempt.output(ids[2:])

    served.cluster.script = script
    body = (await served.complete()).json()
    assert body["choices"][0]["text"] == TEXT
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for name in ("Tokens", "PrefillStarted", "Finished", "RequestFailed"):
        assert served.metric(f"stale_messages_total{{type={name}}}") == 1


@pytest.mark.parametrize(
    ("ids", "reason", "options"),
    [
        (encode("abc"), "length", {"max_tokens": 3}),
        ([*encode("ab"), EOS], "stop", {}),
        (encode("abz"), "stop", {"stop_token_ids": encode("z")}),
    ],
)
async def test_an_attempt_lost_after_its_last_token_is_complete(
    served: Served, ids: list[int], reason: str, options: dict[str, Any]
) -> None:
    async def script(attempt: Attempt) -> None:
        attempt.tokens(ids)
        await asyncio.sleep(0.2)
        attempt.failed(ErrorCode.ENGINE_LOST)

    served.cluster.script = script
    body = (await served.complete(**options)).json()
    assert body["choices"][0]["finish_reason"] == reason
    assert body["choices"][0]["text"] == ("abc" if reason == "length" else "ab")
    assert body["usage"]["completion_tokens"] == 3
    assert len(served.cluster.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_a_request(model: Path, stream: bool) -> None:
    async with serve(model, timeouts__request_s=0.4) as served:

        async def script(attempt: Attempt) -> None:
            if stream:
                attempt.tokens(encode("a"))

        served.cluster.script = script
        start = time.monotonic()
        response = await served.complete(stream=stream)
        assert time.monotonic() - start < 2
        if stream:
            assert events_of(response.text)[-1]["error"]["code"] == "deadline"
        else:
            expect_error(response, None, "within 0.4 s", status=504)
        await served.cluster.until(lambda: served.cluster.cancelled == [(served.cluster.requests[0].request_id, 0)])


async def test_preemption_does_not_outlive_the_deadline(model: Path) -> None:
    async with serve(model, timeouts__request_s=0.4) as served:
        served.cluster.script = loses(ErrorCode.PREEMPTED, after=0, times=10**6)
        expect_error(await served.complete(), None, "within 0.4 s", status=504)


@pytest.mark.parametrize("code", [ErrorCode.STRANGER, ErrorCode.DRAINING])
async def test_a_scheduler_that_takes_nothing_is_not_asked_all_the_time(served: Served, code: ErrorCode) -> None:
    """It refuses at once: whoever asked at once again would keep both of them busy."""
    served.says("ok")
    served.cluster.refusal = DualPathError(code, "not now")
    begun = time.monotonic()
    asking = asyncio.create_task(served.complete())
    await served.cluster.until(lambda: len(served.cluster.requests) == 4)
    assert time.monotonic() - begun >= 3 * REFUSED_PAUSE_S
    served.cluster.refusal = None
    assert (await asking).json()["choices"][0]["text"] == "ok"
