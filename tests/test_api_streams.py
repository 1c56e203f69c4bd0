"""Many streams at once: CPU of the front end per streamed token, and how evenly tokens come. Prints.

The engines are profiled: a cluster of its own beside the front end's process, so that its CPU can be told apart.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config import load_config
from common.messages import Tokens
from common.model import configured_scaling
from common.rpc import Link
from tests.cluster import cluster_config, run_cluster
from tests.frontend_harness import front_end_process

#: Of the hardware a step of such a batch takes some 7 ms; stretched, tokens come 20 times a second.
SETTINGS: dict[str, Any] = {
    "perf__time_factor": 7.0,
    "decode__max_running": 600,
    "decode__device_memory": "64MiB",
    "decode__buffer": "32MiB",
    "prefill__buffer": "32MiB",
    "prefill__max_batch_tokens": 8192,
    "prefill__max_batch_requests": 128,
    "timeouts__heartbeat_timeout_s": 60.0,
}
FEW, MANY = 10, 500
DECODE_ENGINES = 5
TOKENS = 100


class Stream(asyncio.Protocol):
    """A client of one stream that costs little: it counts events and notes when the first and the last token came."""

    def __init__(self, body: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.first = self.last = 0.0
        self._head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._body = body

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._head + self._body)

    def data_received(self, data: bytes) -> None:
        tokens = data.count(b'"token_ids":[') - data.count(b'"token_ids":[]')
        if tokens:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.events += tokens
        if b"[DONE]" in data:
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream was cut"))


async def play(port: int, count: int, tokens: int) -> list[float]:
    """So many streams at once; the time per output token of each, seconds."""
    loop = asyncio.get_running_loop()

    async def one(number: int) -> float:
        prompt = [random.Random(number).randrange(1000) for _ in range(40)]
        asked = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps(asked).encode()
        _, stream = await loop.create_connection(lambda: Stream(body), "127.0.0.1", port)
        await stream.ended
        return (stream.last - stream.first) / (tokens - 1)

    return await asyncio.gather(*(one(number) for number in range(count)))


@asynccontextmanager
async def cluster_and_front_end(blocks: Path) -> AsyncIterator[tuple[int, psutil.Process]]:
    config = cluster_config("ds-27b", blocks, **SETTINGS)
    async with (
        run_cluster(config, decode=DECODE_ENGINES, driver=False) as cluster,
        front_end_process(cluster.config) as (url, process),
    ):
        yield int(url.rpartition(":")[2]), process


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


@pytest.mark.benchmarks
@pytest.mark.timeout(600)
async def test_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of few and of many streams by turns."""
    sent: list[int] = []
    send = Link.send

    def counting(link: Link, msg: object) -> None:
        if isinstance(msg, Tokens):
            sent.append(len(msg.tokens))
        send(link, msg)

    monkeypatch.setattr(Link, "send", counting)
    async with cluster_and_front_end(tmp_path) as (port, process):
        await play(port, FEW, 4)
        tpot: dict[int, list[float]] = {FEW: [], MANY: []}
        for _ in range(2):
            for count in (FEW, MANY):
                short_s, full_s = cpu_s(process), 0.0
                await play(port, count, 2)
                short_s = cpu_s(process) - short_s
                sent.clear()
                full_s = cpu_s(process)
                tpot[count] += await play(port, count, TOKENS)
                full_s = cpu_s(process) - full_s
                token_us = (full_s - short_s) / count / (TOKENS - 2) * 1e6
                print(f"\n{count} streams: {token_us:.0f} us CPU of the front end a token", end="; ")
                print(f"{sum(sent) / len(sent):.1f} tokens a message of an engine", end="; ")
                print(
                    f"TPOT p50 {percentile(tpot[count], 50) * 1e3:.1f}, p99 {percentile(tpot[count], 99) * 1e3:.1f} ms"
                )
    step = configured_scaling(load_config(None, {"model.profile": "ds-27b"})).compute.decode_step_s
    alone = step([90] * (MANY // DECODE_ENGINES)) / step([90] * (FEW // DECODE_ENGINES))
    print(f"TPOT p99, {MANY} streams / {FEW}: {percentile(tpot[MANY], 99) / percentile(tpot[FEW], 99):.2f}")
    print(f"the hardware's steps alone, as predicted: {alone:.2f}")
