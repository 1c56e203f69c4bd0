"""Hits that the client knows of go to the scheduler; the parts of the time to first token come back to the client."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import ErrorCode
from tests.frontend_harness import Attempt, Script, Served, encode

IDS = encode("abc")


def reports(*parts_s: float, after_s: float = 0.0) -> Script:
    async def script(attempt: Attempt) -> None:
        attempt.started(4, *parts_s)
        await asyncio.sleep(after_s)
        await attempt.output(IDS)

    return script


@pytest.mark.parametrize("hit_tokens", [None, 0, 6])
async def test_hits_that_the_client_knows_of_go_with_every_attempt(served: Served, hit_tokens: int | None) -> None:
    async def script(attempt: Attempt) -> None:
        if attempt.request.attempt == 0:
            attempt.failed(ErrorCode.ENGINE_LOST)
        else:
            await attempt.output(IDS)

    served.cluster.script = script
    assert (await served.complete(prompt=[5] * 6, hit_tokens=hit_tokens)).status_code == 200
    assert [request.hit_tokens for request in served.cluster.requests] == [hit_tokens, hit_tokens]


async def test_the_parts_of_ttft_are_in_the_usage(served: Served) -> None:
    served.cluster.script = reports(0.001, 0.002, 0.003, after_s=0.05)
    before = time.monotonic()
    usage = (await served.complete()).json()["usage"]
    elapsed_s = time.monotonic() - before
    timing = usage["timing"]
    assert set(timing) == {"scheduling_s", "allocation_s", "read_s", "prefill_s"}
    assert (timing["scheduling_s"], timing["allocation_s"], timing["read_s"]) == (0.001, 0.002, 0.003)
    assert 0.05 <= sum(timing.values()) <= elapsed_s, "together they are the time to first token"


async def test_a_part_that_is_longer_than_it_all_leaves_no_prefill(served: Served) -> None:
    served.cluster.script = reports(0.5, 99.0, 0.25)
    timing = (await served.complete()).json()["usage"]["timing"]
    assert timing == {"scheduling_s": 0.5, "allocation_s": 99.0, "read_s": 0.25, "prefill_s": 0.0}


async def test_a_stream_tells_them_at_its_end_to_who_asks(served: Served) -> None:
    served.cluster.script = reports(0.5, 99.0, 0.25)
    events = await served.stream(stream_options={"include_usage": True})
    assert events[-2]["usage"]["timing"]["allocation_s"] == 99.0
    assert all(event["usage"] is None for event in events[:-2])
    assert all("usage" not in event for event in (await served.stream())[:-1])


async def test_the_first_attempts_report_counts(served: Served) -> None:
    async def script(attempt: Attempt) -> None:
        number = attempt.request.attempt
        attempt.started(number, 99.0 + number, 0.0, 0.0)
        await asyncio.sleep(0.02)
        if number == 0:
            attempt.failed(ErrorCode.ENGINE_LOST)
        else:
            await attempt.output(IDS)

    served.cluster.script = script
    assert (await served.complete()).json()["usage"]["timing"]["scheduling_s"] == 99.0


async def test_without_a_report_there_is_no_timing(served: Served) -> None:
    served.says("abc")
    assert "timing" not in (await served.complete()).json()["usage"]
