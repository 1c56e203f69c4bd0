"""The life of a client request through lost attempts, bad messages, time-outs and clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common.errors import DualPathError, ErrorCode
from common.types import FinishReason
from services.frontend.client_request import REFUSED_PAUSE_S
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
    write_model,
)

TEXT = "ab😀cd"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("frontend") / "tiny")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serve(model) as served:
        yield served


def loses(code: ErrorCode, after: int, times: int = 1) -> Any:
    """A script: the first attempts deliver so many more tokens of TEXT and are lost; the next one goes to the end."""
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        done = attempt.request.num_generated
        if attempt.request.attempt < times:
            attempt.tokens(ids[done : done + after])
            await asyncio.sleep(0.05)
            attempt.failed(code)
        else:
            await attempt.output(ids[done:])

    return script


# ---- lost attempts -------------------------------------------------------------------------------------------------


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
        await asyncio.sleep(0.02)
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
            await asyncio.sleep(0.05)
            attempt.failed(ErrorCode.ENGINE_LOST)
            return
        old[0].tokens(encode("XXXX"), index=2)
        old[0].started(99)
        old[0].finished(2)
        old[0].failed(ErrorCode.INTERNAL)
        await asyncio.sleep(0.05)
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
        await asyncio.sleep(0.02)
        attempt.failed(ErrorCode.ENGINE_LOST)

    served.cluster.script = script
    body = (await served.complete(**options)).json()
    assert body["choices"][0]["finish_reason"] == reason
    assert body["choices"][0]["text"] == ("abc" if reason == "length" else "ab")
    assert body["usage"]["completion_tokens"] == 3
    assert len(served.cluster.requests) == 1


# ---- order ---------------------------------------------------------------------------------------------------------


async def test_the_first_token_may_be_overtaken(served: Served) -> None:
    """It comes from the prefill engine, the others and the end from the decode engine."""
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        attempt.tokens(ids[1:], index=1)
        attempt.finished(len(ids))
        await asyncio.sleep(0.05)
        attempt.tokens(ids[:1], index=0)

    served.cluster.script = script
    assert text_of(await served.stream()) == TEXT
    assert len(served.cluster.requests) == 1


async def test_duplicates_are_shown_once(served: Served) -> None:
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        for index, token in enumerate(ids):
            attempt.tokens([token], index)
            attempt.tokens([token], index)
            attempt.tokens(ids[: index + 1], 0)
        attempt.finished(len(ids))
        attempt.finished(len(ids))

    served.cluster.script = script
    events = await served.stream(return_token_ids=True)
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == ids


@pytest.mark.parametrize("lost", [0, 2, 7])
async def test_a_token_that_never_comes_fails_the_attempt(served: Served, lost: int) -> None:
    """Also the last one, which only the count of the end tells of."""
    ids = encode(TEXT)
    assert len(ids) == 8

    async def script(attempt: Attempt) -> None:
        done = attempt.request.num_generated
        if attempt.request.attempt:
            await attempt.output(ids[done:])
            return
        for index in range(len(ids)):
            if index != lost:
                attempt.tokens([ids[index]], index)
        attempt.finished(len(ids))

    served.cluster.script = script
    assert (await served.complete()).json()["choices"][0]["text"] == TEXT
    second = served.cluster.requests[1]
    assert second.num_generated == lost
    await served.cluster.until(lambda: served.cluster.cancelled == [(second.request_id, 0)])
    assert served.metric("retries_total{code=transfer_failed}") == 1


async def test_an_end_that_counts_too_few_fails_the_attempt(served: Served) -> None:
    async def script(attempt: Attempt) -> None:
        attempt.tokens(encode("abc"))
        attempt.finished(2)

    served.cluster.script = script
    expect_error(await served.complete(), None, "did not arrive", status=500)
    assert len(served.cluster.requests) == 3


async def test_a_second_gap_gets_its_own_time(served: Served) -> None:
    """The clock runs for the token that is missing, not for the request."""
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        for index in range(0, len(ids), 2):
            attempt.tokens([ids[index + 1]], index + 1)
            await asyncio.sleep(0.15)
            attempt.tokens([ids[index]], index)
        attempt.finished(len(ids))

    served.cluster.script = script
    assert (await served.complete()).json()["choices"][0]["text"] == TEXT
    assert len(served.cluster.requests) == 1


# ---- time ----------------------------------------------------------------------------------------------------------


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


# ---- clients that leave, and too many of them ------------------------------------------------------------------------


async def silent(attempt: Attempt) -> None:
    """An engine that takes its time."""


@pytest.mark.parametrize("when", ["before the first token", "streaming", "not streaming"])
async def test_a_client_that_leaves_cancels(served: Served, when: str) -> None:
    async def script(attempt: Attempt) -> None:
        if when != "before the first token":
            attempt.tokens(encode("ab"))

    served.cluster.script = script
    body = {"prompt": "hello", "max_tokens": 64, "stream": when != "not streaming"}
    client = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await served.cluster.until(lambda: len(served.cluster.requests) == 1)
    await asyncio.sleep(0.05)
    client.cancel()
    await served.cluster.until(lambda: served.cluster.cancelled == [(served.cluster.requests[0].request_id, 0)])
    await served.ended()
    assert served.metric("requests_total{outcome=cancelled}") == 1


async def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels(served: Served) -> None:
    async def endless(attempt: Attempt) -> None:
        for index in range(64):
            attempt.tokens(encode("a"), index)
            await asyncio.sleep(0.01)

    served.cluster.script = endless
    body = {"prompt": "hello", "max_tokens": 64, "stream": True}
    async with served.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 1)


async def test_an_end_that_is_known_is_not_cancelled(served: Served) -> None:
    served.says("abc", FinishReason.STOP, end=[EOS])
    await served.stream()
    await served.complete()
    await asyncio.sleep(0.05)
    assert served.cluster.cancelled == []


async def test_requests_over_the_bound_are_refused_at_once(model: Path) -> None:
    async with serve(model, frontend__max_pending=2) as served:
        served.cluster.script = silent
        waiting = [asyncio.create_task(served.complete()) for _ in range(2)]
        await served.cluster.until(lambda: len(served.cluster.requests) == 2)
        refused = await served.complete()
        expect_error(refused, None, "2 requests are in hand", status=503)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await served.http.get("/health")).status_code == 200
        for task in waiting:
            task.cancel()
        await served.cluster.until(lambda: len(served.cluster.cancelled) == 2)
        served.says("ok")
        assert (await served.complete()).status_code == 200


async def test_mixed_requests_leave_nothing_behind(model: Path) -> None:
    """Completed, failed, stopped and cancelled at many moments: no request, task or descriptor stays."""
    async with serve(model) as served:

        async def script(attempt: Attempt) -> None:
            number = int(attempt.request.request_id.split("-")[0])
            if number % 4 == 0:
                attempt.failed(ErrorCode.INTERNAL)
            for index, token in enumerate(encode("some text END more")):
                attempt.tokens([token], index)
                await asyncio.sleep(0.002)
            attempt.finished(18)

        served.says("x")
        await served.complete(max_tokens=1)  # from here on every link is up
        served.cluster.script = script
        process = psutil.Process()
        baseline = (0, len(asyncio.all_tasks()), process.num_fds())
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.frontend.url, timeout=10, limits=limits) as http:

            async def one(number: int) -> None:
                body = {"prompt": "x", "max_tokens": 64, "stream": number % 2 == 0}
                if number % 5 == 0:
                    body["stop"] = "END"
                call = http.post("/v1/completions", json=body, headers={"X-Request-Id": str(number)})
                try:
                    async with asyncio.timeout(0.001 * number if number % 3 == 0 else None):
                        await call
                except TimeoutError:
                    pass

            await asyncio.gather(*(one(number) for number in range(100)))
        async with asyncio.timeout(5):
            while (len(served.frontend.requests), len(asyncio.all_tasks()), process.num_fds()) != baseline:
                await asyncio.sleep(0.02)
        assert served.metric("requests_in_hand") == 0
        assert served.metric("requests_total{outcome=length}") > 0
        assert served.metric("requests_total{outcome=stop}") > 0


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
