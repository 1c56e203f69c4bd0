"""Tokens and ends that come out of order, twice, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from tests.frontend_harness import (
    Attempt,
    Served,
    encode,
    expect_error,
    text_of,
)

TEXT = "ab😀cd"


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
