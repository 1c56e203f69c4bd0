"""Bounds on the work in hand: what is over them is refused at once, whatever comes and goes (C01, C06)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DualPathError, ErrorCode
from services.frontend.admission import Admission
from services.frontend.errors import ApiError
from services.frontend.tenants import EVERYBODY, Tenant
from tests.frontend_harness import Attempt, expect_error, serve


def test_places_worked_by_hand() -> None:
    admission = Admission(max_pending=5, max_queued_tokens=0)
    small = Tenant("small", max_pending=2)
    admission.take(EVERYBODY, 3)
    admission.take(small, 1)
    with pytest.raises(DualPathError) as full:
        admission.take(EVERYBODY, 2)
    assert full.value.code is ErrorCode.OVERLOADED and "5 requests" in full.value.message
    with pytest.raises(ApiError) as limited:
        admission.take(small, 2)
    assert limited.value.status == 429
    admission.take(small, 1)
    assert admission.in_hand == 5
    admission.give_back(EVERYBODY, 3)
    with pytest.raises(ApiError):
        admission.take(small, 1)


def test_queued_tokens_worked_by_hand() -> None:
    admission = Admission(max_pending=9, max_queued_tokens=100)
    admission.queue(1000)  # alone, any length
    with pytest.raises(DualPathError) as full:
        admission.queue(1)
    assert full.value.code is ErrorCode.OVERLOADED and "1000 tokens" in full.value.message
    admission.unqueue(1000)
    admission.queue(60)
    admission.queue(40)
    with pytest.raises(DualPathError):
        admission.queue(1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=40), st.integers(1, 8))
def test_never_more_than_the_bound_and_nothing_at_the_end(steps: list[tuple[int, int]], limit: int) -> None:
    admission = Admission(limit, 0)
    tenants = [Tenant(str(index), max_pending=3) for index in range(3)]
    held: list[tuple[Tenant, int]] = []
    for count, which in steps:
        before = admission.in_hand
        try:
            admission.take(tenants[which], count)
            held.append((tenants[which], count))
        except (DualPathError, ApiError):
            assert admission.in_hand == before, "all or none"
            if held:
                admission.give_back(*held.pop(0))
        assert admission.in_hand == sum(count for _, count in held) <= limit
        for tenant in tenants:
            assert sum(count for other, count in held if other is tenant) <= 3
    for tenant, count in held:
        admission.give_back(tenant, count)
    assert admission.in_hand == 0


async def test_prompts_that_wait_for_their_first_token_are_bounded(model: Path) -> None:
    """Once the first token is there a request does not count, nor once its client has left."""
    async with serve(model, frontend__max_queued_tokens=100) as served:
        go_on = asyncio.Event()

        async def script(attempt: Attempt) -> None:
            await go_on.wait()
            await attempt.output([5, 6])

        served.cluster.script = script
        first, second = (asyncio.create_task(served.complete(prompt=[7] * 50)) for _ in range(2))
        await served.cluster.until(lambda: len(served.cluster.requests) == 2)
        assert served.metric("queued_tokens") == 100
        refused = await served.complete(prompt=[7])
        expect_error(refused, None, "prompts of 100 tokens wait", status=503)
        assert "retry-after" in refused.headers and refused.headers["x-request-id"]
        second.cancel()
        await served.cluster.until(lambda: len(served.cluster.cancelled) == 1)
        third = asyncio.create_task(served.complete(prompt=[7] * 50))
        await served.cluster.until(lambda: len(served.cluster.requests) == 3)
        go_on.set()
        assert (await first).status_code == (await third).status_code == 200
        await served.ended()
        assert served.metric("queued_tokens") == served.metric("requests_in_hand") == 0


async def test_a_thousand_clients_that_leave_leave_no_count_behind(model: Path) -> None:
    """C06: at whatever moment they leave."""
    async with serve(model, frontend__max_queued_tokens=1 << 30, frontend__max_pending=64) as served:

        async def script(attempt: Attempt) -> None:
            for index in range(8):
                await asyncio.sleep(0.002)
                attempt.tokens([5], index)

        served.cluster.script = script

        async def visit(number: int) -> None:
            body = {"prompt": [7] * 20, "max_tokens": 9, "n": number % 3 + 1, "stream": number % 2 == 0}
            try:
                async with asyncio.timeout(0.001 * (number % 23)):
                    await served.http.post("/v1/completions", json=body)
            except TimeoutError:
                pass

        for first in range(0, 1000, 20):
            await asyncio.gather(*(visit(number) for number in range(first, first + 20)))
        await served.ended()
        assert served.metric("queued_tokens") == served.metric("requests_in_hand") == 0
