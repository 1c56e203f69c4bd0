"""D09: a prompt of 5 MB beside 20 streams: how long /health and the next token take meanwhile. Prints."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from common.config import load_config
from common.messages import Token, Tokens
from tests.frontend_harness import Attempt, FakeCluster, front_end_process, write_model

LIMIT = 65_536
STREAMS = 20
STEP_S = 0.02
STEPS = 400


class Engine:
    """Decodes all streams together, a step every STEP_S."""

    def __init__(self) -> None:
        self._streams: list[Attempt] = []

    async def __call__(self, attempt: Attempt) -> None:
        self._streams.append(attempt)
        if len(self._streams) < STREAMS:
            return
        due = time.monotonic()
        for index in range(STEPS):
            attempt.link.send(Tokens([Token(each.request.request_id, 0, index, 5) for each in self._streams]))
            due += STEP_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        for each in self._streams:
            each.finished(STEPS)
        self._streams.clear()


async def gaps_of(http: httpx.AsyncClient) -> list[float]:
    """Seconds between the tokens of one stream."""
    times = []
    body = {"prompt": "x", "max_tokens": STEPS, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return [after - before for before, after in itertools.pairwise(times)]


async def observe(http: httpx.AsyncClient, beside: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """p99 of /health and of the gaps of the streams, seconds, while beside() is done again and again."""
    health: list[float] = []

    async def probe() -> None:
        while True:
            begun = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            health.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)

    async def disturb() -> None:
        while True:
            await beside()

    others = [asyncio.create_task(probe()), asyncio.create_task(disturb())]
    gaps = [gap for stream in await asyncio.gather(*(gaps_of(http) for _ in range(STREAMS))) for gap in stream]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return sorted(health)[len(health) * 99 // 100], sorted(gaps)[len(gaps) * 99 // 100]


@pytest.mark.benchmarks
async def test_large_prompts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LIMIT}))
    cluster = FakeCluster(engine_limit=LIMIT)
    await cluster.start()
    cluster.script = Engine()
    settings = {"model.path": str(model), "frontend.port": 0, "scheduler.control": cluster.scheduler.endpoint}
    text = json.dumps({"prompt": "some words " * 470_000, "max_tokens": 1}).encode()
    ids = json.dumps({"prompt": [77] * 1_280_000, "max_tokens": 1}).encode()
    assert 5e6 < len(text) < 6e6 and 5e6 < len(ids) < 6e6
    try:
        async with (
            front_end_process(
                load_config(overrides={**settings, "log.level": "error", "timeouts.heartbeat_timeout_s": 60.0})
            ) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
        ):

            async def nothing() -> None:
                await asyncio.sleep(1)

            def sending(body: bytes) -> Callable[[], Awaitable[None]]:
                async def send() -> None:
                    assert (await http.post("/v1/completions", content=body)).status_code == 400
                    await asyncio.sleep(0.2)

                return send

            for name, beside in (("nothing", nothing), ("5 MB of text", sending(text)), ("5 MB of ids", sending(ids))):
                health, gap = await observe(http, beside)
                print(f"\nbeside {name}: /health p99 {health * 1e3:.0f} ms, gap of streams p99 {gap * 1e3:.0f} ms")
    finally:
        await cluster.close()
