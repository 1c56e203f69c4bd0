"""What a front end costs in CPU time: a long prompt of token ids, and one streamed token of few streams and of many.
Prints."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from common.config import load_config
from common.messages import Token, Tokens
from common.types import FinishReason
from tests.frontend_harness import Attempt, FakeCluster, front_end_process, write_model

LIMIT = 65_536
PROMPT_TOKENS = 33_000
VOCAB_SIZE = 300
FEW, MANY = 8, 500


class Steps:
    """An engine that decodes so many requests together: one message a step, with a token of each."""

    def __init__(self, steps: int, streams: int, pace_s: float) -> None:
        self._steps = steps
        self._streams = streams
        self._pace_s = pace_s
        self._waiting: list[Attempt] = []

    async def __call__(self, attempt: Attempt) -> None:
        attempt.started(0)
        self._waiting.append(attempt)
        if len(self._waiting) < self._streams:
            return
        link = attempt.link
        for index in range(self._steps):
            link.send(Tokens([Token(each.request.request_id, 0, index, 5) for each in self._waiting]))
            await asyncio.sleep(self._pace_s)
        for each in self._waiting:
            each.finished(self._steps, FinishReason.LENGTH)
        self._waiting.clear()


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient, psutil.Process]]:
    model = write_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LIMIT}))
    cluster = FakeCluster(engine_limit=LIMIT)
    await cluster.start()
    settings = {
        "model.path": str(model),
        "frontend.port": 0,
        "scheduler.control": cluster.scheduler.endpoint,
        "timeouts.heartbeat_timeout_s": 60.0,  # this process is the busier one
    }
    try:
        async with (
            front_end_process(load_config(overrides=settings)) as (url, process),
            httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=MANY)) as http,
        ):
            yield cluster, http, process
    finally:
        await cluster.close()


async def _cpu_s(
    http: httpx.AsyncClient, process: psutil.Process, prompt: list[int], tokens: int, streams: int
) -> float:
    """CPU seconds of the front end for so many streams at once."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "return_token_ids": True}
    before = process.cpu_times()
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(streams)))
    assert all(answer.status_code == 200 and answer.text.endswith("[DONE]\n\n") for answer in answers)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


@pytest.mark.benchmarks
async def test_cost(child: tuple[FakeCluster, httpx.AsyncClient, psutil.Process]) -> None:
    cluster, http, process = child
    long = [random.Random(i).randrange(VOCAB_SIZE) for i in range(PROMPT_TOKENS)]
    cluster.script = Steps(1, FEW, 0.0)
    for _ in range(2):
        await _cpu_s(http, process, long, 1, FEW)
    rounds = 5
    prompt_s = sum([await _cpu_s(http, process, long, 1, FEW) for _ in range(rounds)]) / (rounds * FEW)
    short_s = sum([await _cpu_s(http, process, long[:64], 1, FEW) for _ in range(rounds)]) / (rounds * FEW)
    print(f"\na prompt of {PROMPT_TOKENS} token ids: {prompt_s * 1e3:.1f} ms CPU; of 64: {short_s * 1e3:.1f} ms")
    for streams, steps, pace_s in ((FEW, 500, 0.002), (MANY, 100, 0.05)):
        cluster.script = Steps(steps, streams, pace_s)
        token_s = (await _cpu_s(http, process, long[:64], steps, streams) / streams - short_s) / (steps - 1)
        print(f"a streamed token, {streams} streams a step: {token_s * 1e6:.0f} us CPU")
