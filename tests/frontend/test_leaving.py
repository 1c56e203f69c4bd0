"""Clients that leave, and too many of them: nothing stays behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest

from common.errors import ErrorCode
from common.types import FinishReason
from tests.frontend_harness import (
    EOS,
    Attempt,
    Served,
    encode,
    expect_error,
    serve,
)


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
