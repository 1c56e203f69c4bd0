"""Whoever reads slowly, or not at all for a while, loses nothing and holds up nobody (D01)."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common.config import load_config
from tests.frontend_harness import Attempt, FakeCluster, encode, events_of, front_end_process, write_model

LIMIT = 16_384
FRAMES = 5_000


@pytest.fixture
async def front_end(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, str, psutil.Process]]:
    model = write_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LIMIT}))
    cluster = FakeCluster(engine_limit=LIMIT)
    await cluster.start()
    settings = {
        "model.path": str(model),
        "frontend.port": 0,
        "scheduler.control": cluster.scheduler.endpoint,
        "timeouts.heartbeat_timeout_s": 60.0,
        "log.level": "warning",
    }
    try:
        async with front_end_process(load_config(overrides=settings)) as (url, process):
            yield cluster, url, process
    finally:
        await cluster.close()


def body_of(max_tokens: int) -> dict[str, Any]:
    asked = {"prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return {**asked, "return_token_ids": True, "stream_options": {"include_usage": True}}


async def test_a_front_end_that_stands_still_misses_no_frame(
    front_end: tuple[FakeCluster, str, psutil.Process],
) -> None:
    """5,000 frames of one token arrive while it is stopped: all are there afterwards, in order, in one attempt; the
    client is told together what came together."""
    cluster, url, process = front_end
    letters = encode("abcdefghij")

    async def script(attempt: Attempt) -> None:
        attempt.tokens([letters[0]], 0)
        await asyncio.sleep(0.2)
        process.suspend()
        for index in range(1, FRAMES):
            attempt.tokens([letters[index % 10]], index)
            if index % 100 == 0:
                await asyncio.sleep(0.01)
        attempt.finished(FRAMES)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGCONT)

    cluster.script = script
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        events = events_of((await http.post("/v1/completions", json=body_of(FRAMES))).text)
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == [letters[index % 10] for index in range(FRAMES)]
    assert usage["usage"]["completion_tokens"] == FRAMES
    assert len(cluster.requests) == 1
    assert len(chunks) < FRAMES / 2


async def test_a_client_that_does_not_read_holds_up_nobody(
    front_end: tuple[FakeCluster, str, psutil.Process],
) -> None:
    """Its output waits, bounded by its length, while others come and go; read at last, it is whole."""
    cluster, url, process = front_end
    count = 12_000

    async def script(attempt: Attempt) -> None:
        total = attempt.request.sampling.max_tokens
        for first in range(0, total, 50):
            attempt.tokens(encode("y") * min(50, total - first), first)
            await asyncio.sleep(0)
        attempt.finished(total)

    cluster.script = script
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body_of(count)) as slow,
    ):
        lines = slow.aiter_lines()
        await anext(lines)
        before = process.memory_info().rss
        for _ in range(20):
            other = events_of((await http.post("/v1/completions", json=body_of(100))).text)
            assert other[-1] == "[DONE]" and other[-2]["usage"]["completion_tokens"] == 100
        assert process.memory_info().rss - before < 32 << 20
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == count
    assert len(cluster.requests) == 21
