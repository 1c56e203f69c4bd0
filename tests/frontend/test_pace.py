"""Many paced streams through one front end: figures of one run over real processes with a profiled model, whose decode
engine makes 20 tokens a second for each of its sequences, few or many. Nothing here asserts a time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.cluster import Process, Processes, with_control
from common.config import Config, load_config
from common.messages import Member
from common.model import configured_scaling
from common.rundir import RunDirectory
from common.types import Role
from common.watchdog import LIMIT_S, NAME
from services.launcher.status import get_status
from tests.test_overload import ROLES

pytestmark = [pytest.mark.benchmarks, pytest.mark.timeout(600)]
STEP_S = 0.05
FEW, MANY, ROUNDS = 10, 500, 2
PROMPT_TOKENS, MAX_TOKENS = 100, 200
#: Seconds over which the streams of a round begin.
RAMP_S = 4.0


def config(blocks: Path) -> Config:
    """Steps are bound by reading the weights, of which an engine that stands for eight GPUs reads one GPU's: they take
    as long for many sequences as for few."""
    base = {
        "model.profile": "ds-27b",
        "storage.path": str(blocks),
        "scheduler.control": "tcp://127.0.0.1:*",
        "prefill.max_batch_tokens": 8192,
        "prefill.max_batch_requests": 64,
        "decode.max_running": MANY,
        "frontend.port": 0,
        "perf.gpus": 8,
        "timeouts.heartbeat_timeout_s": 60.0,
        "log.level": "error",
    }
    step_s = configured_scaling(load_config(None, base)).compute.decode_step_s([PROMPT_TOKENS + MAX_TOKENS] * FEW)
    return load_config(None, {**base, "perf.time_factor": STEP_S / step_s})


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """One streamed completion by hand: a client that costs the machine as little as can be. times: of its events."""

    request: bytes
    times: list[float] = field(default_factory=list)
    end: bytes = b""
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data:
            self.times.append(time.perf_counter())
        self.end = (self.end + data)[-200:]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / (MAX_TOKENS - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


async def play(url: str, count: int, seed: int) -> list[Stream]:
    """So many streams at once, every one of them to its end."""
    target, rng = urlsplit(url), random.Random(seed)
    loop = asyncio.get_running_loop()

    async def one(delay_s: float) -> Stream:
        prompt = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, "return_token_ids": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close"
        await asyncio.sleep(delay_s)
        stream = Stream(head.encode() + b"\r\n\r\n" + content)
        await loop.create_connection(lambda: stream, target.hostname, target.port)
        await stream.closed.wait()
        assert b"[DONE]" in stream.end, stream.end
        return stream

    gc.disable()  # the client's pauses are none of the server's
    try:
        return await asyncio.gather(*(one(RAMP_S * number / count) for number in range(count)))
    finally:
        gc.enable()


async def slow_callbacks(member: Member) -> tuple[int, float]:
    """How often the event loop of a process was kept over LIMIT_S so far; and the bound under which 99.99 % are."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{member.health}/metrics")).text
    counts: Counter[float] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"dualpath_{NAME}_bucket":
                counts[float(sample.labels["le"])] += int(sample.value)
    total = counts[float("inf")]
    return total - counts[LIMIT_S], min(bound for bound, count in counts.items() if count >= 0.9999 * total)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


async def test_many_streams_are_as_even_as_few(tmp_path: Path) -> None:
    own = config(tmp_path / "blocks")
    p99: dict[int, list[float]] = {FEW: [], MANY: []}
    with RunDirectory(tmp_path) as run:
        async with Processes({name: Process(role, own) for name, role in ROLES.items()}, run) as cluster:
            status = await get_status(with_control(own, cluster.control))
            [member] = [entry.member for entry in status.members if entry.member.role is Role.FRONTEND]
            processes = {entry.member.name: psutil.Process(entry.member.pid) for entry in status.members}
            await play(cluster.url, FEW, 0)  # warm
            print()
            for number in range(2 * ROUNDS):
                count = (FEW, MANY)[number % 2]
                slow, _ = await slow_callbacks(member)
                before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
                began = time.perf_counter()
                streams = await play(cluster.url, count, number + 1)
                took_s = time.perf_counter() - began
                cpu_s = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
                tpot = [stream.tpot_s for stream in streams]
                gaps = [gap for stream in streams for gap in stream.gaps_s]
                p99[count].append(percentile(tpot, 0.99))
                after, bound = await slow_callbacks(member)
                print(f"{count} streams: TPOT p50 {statistics.median(tpot) * 1e3:.1f} ms", end="")
                print(f", p99 {p99[count][-1] * 1e3:.1f}", end="")
                print(f"; between events p99 {percentile(gaps, 0.99) * 1e3:.1f}", end="")
                print(f"; front end {cpu_s['frontend'] / (count * MAX_TOKENS) * 1e6:.0f} us CPU a token", end="")
                print(f", {after - slow} callbacks over 20 ms, 99.99 % within {bound * 1e3:g} ms")
                shares = {name: seconds / took_s for name, seconds in cpu_s.items() if seconds / took_s > 0.03}
                print("  cores:", ", ".join(f"{name} {share:.2f}" for name, share in shares.items()), end="")
                print(f"; load of the machine {psutil.getloadavg()[0]:.1f}")
    ratios = [many / few for few, many in zip(p99[FEW], p99[MANY], strict=True)]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"TPOT p99, {MANY} streams against {FEW}: {shown} (target: under 1.2)")
