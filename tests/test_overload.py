"""What is left of a cluster's capacity when five times as much is asked of it, and how long a cluster takes to start:
figures of one run over real processes with a profiled model. Nothing here asserts a time."""

from __future__ import annotations

import asyncio
import json
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

from common.cluster import Process, Processes
from common.config import Config, load_config
from common.rundir import RunDirectory
from common.types import Role
from services.launcher.status import get_status

pytestmark = [pytest.mark.benchmarks, pytest.mark.timeout(600)]
CAPACITY_S, OVERLOAD_S = 20.0, 60.0
TIMES = 5
BODY = {"prompt": list(range(100)), "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
ROLES = {
    "scheduler": Role.SCHEDULER,
    "storage-gateway": Role.STORAGE_GATEWAY,
    "frontend": Role.FRONTEND,
    "prefill-0": Role.PREFILL,
    "decode-0": Role.DECODE,
}


def config(blocks: Path) -> Config:
    """About 20 requests a second: 8 at a time, each for 10 decode steps. Three times as many may be in hand."""
    return load_config(
        None,
        {
            "model.profile": "ds-27b",
            "storage.path": str(blocks),
            "scheduler.control": "tcp://127.0.0.1:*",
            "decode.max_running": 8,
            "frontend.port": 0,
            "frontend.max_pending": 24,
            "perf.time_factor": 3.0,
            "log.level": "error",
        },
    )


@dataclass(slots=True)
class Answers:
    """What clients got: answers by status, and seconds that each took them by status."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def count(self, *statuses: int) -> int:
        return sum(len(self.seconds.get(status, [])) for status in statuses)


async def ask(url: str, answers: Answers) -> None:
    """One request by hand: a client that costs the machine as little as can be. Status 0: no whole answer."""
    target = urlsplit(url)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    began, status = time.perf_counter(), 0
    try:
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        status = int(answer.split(b" ", 2)[1])
        if status == 200 and len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["token_ids"]) != 10:
            status = 0
    except (OSError, ValueError, TimeoutError, IndexError):
        pass
    answers.seconds.setdefault(status, []).append(time.perf_counter() - began)


async def closed_loop(url: str, workers: int, seconds: float) -> Answers:
    """As many as it takes, always so many at once."""
    answers, end = Answers(), time.monotonic() + seconds

    async def work() -> None:
        while time.monotonic() < end:
            await ask(url, answers)

    await asyncio.gather(*(work() for _ in range(workers)))
    return answers


async def open_loop(url: str, rate: float, seconds: float) -> Answers:
    """So many a second, whatever comes of them."""
    answers, began = Answers(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(ask(url, answers))
    return answers


async def server_p99_s(health: str, statuses: set[str]) -> float:
    """The bucket's bound under which 99 % of these answers were ready, by the front end's own clock."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{health}/metrics")).text
    counts: Counter[float] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "dualpath_http_response_seconds_bucket" and sample.labels["status"] in statuses:
                counts[float(sample.labels["le"])] += int(sample.value)
    total = counts[float("inf")]
    return min(bound for bound, count in counts.items() if count >= 0.99 * total)


async def memory_bytes(config: Config) -> dict[str, float]:
    """Resident memory of each process, as it told the scheduler last."""
    status = await get_status(config)
    return {entry.member.name: entry.counters["process_resident_memory_bytes"] for entry in status.members}


async def test_overload_at_five_times_the_capacity(tmp_path: Path) -> None:
    """C01: goodput, refusals and memory."""
    own = config(tmp_path / "blocks")
    with RunDirectory(tmp_path) as run:
        async with Processes({name: Process(role, own) for name, role in ROLES.items()}, run) as cluster:
            own = own.model_copy(update={"scheduler": own.scheduler.model_copy(update={"control": cluster.control})})
            await closed_loop(cluster.url, 8, 3.0)  # warm
            capacity = (await closed_loop(cluster.url, 16, CAPACITY_S)).count(200) / CAPACITY_S
            loading = asyncio.create_task(open_loop(cluster.url, TIMES * capacity, OVERLOAD_S))
            await asyncio.sleep(OVERLOAD_S / 3)
            early = await memory_bytes(own)
            answers = await loading
            late = await memory_bytes(own)
            members = (await get_status(own)).members
            health = next(entry.member.health for entry in members if entry.member.role is Role.FRONTEND)
            p99 = await server_p99_s(health, {"429", "503"})
            again = (await closed_loop(cluster.url, 16, 5.0)).count(200) / 5.0
    good, refused = answers.count(200) / OVERLOAD_S, answers.count(429, 503)
    seen = sorted(answers.seconds.get(429, []) + answers.seconds.get(503, []))
    other = {status: len(took) for status, took in answers.seconds.items() if status not in (200, 429, 503)}
    print(f"\ncapacity {capacity:.1f} requests/s; asked for {TIMES * capacity:.1f} for {OVERLOAD_S:g} s")
    print(f"goodput {good:.1f} requests/s, {good / capacity:.2f} of it; afterwards {again / capacity:.2f} of it")
    print(f"refused {refused}, other failures {other or 'none'}; p99 of a refusal: server <= {p99 * 1e3:g} ms", end="")
    print(f", client p50 {statistics.median(seen) * 1e3:.0f} ms, p99 {seen[int(0.99 * len(seen))] * 1e3:.0f} ms")
    growth = {name: late[name] / early[name] for name in sorted(early)}
    print("memory, last two thirds:", ", ".join(f"{name} {ratio:.3f}" for name, ratio in growth.items()))
    assert refused and not other


async def test_cold_start_of_a_local_cluster(tmp_path: Path) -> None:
    """Scheduler, gateway, front end, one engine of each role and their traffic managers: eight processes."""
    own = config(tmp_path / "blocks")
    for _ in range(2):
        with RunDirectory(tmp_path) as run:
            began = time.perf_counter()
            async with Processes({name: Process(role, own) for name, role in ROLES.items()}, run) as cluster:
                took = time.perf_counter() - began
                mine = psutil.Process()
                cpu = sum(sum(child.cpu_times()[:2]) for child in mine.children(recursive=True))
                assert (await closed_loop(cluster.url, 1, 0.1)).count(200)
        print(f"\ncold start {took:.2f} s, {cpu:.2f} s of CPU; load of the machine {psutil.getloadavg()[0]:.1f}")
