"""What the system costs on top of the model, printed as figures of one run. Nothing here asserts a time."""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

import httpx
import psutil
import pytest

from services.engine.torch_backend.reference import Reference
from tests.cluster import cluster_config, run_cluster
from tests.launch_harness import launched
from tests.models import tiny_model
from tests.test_launch_signals import url_of

pytestmark = pytest.mark.benchmarks
ROUNDS = 60
CONTROL_ROLES = ("scheduler", "storage-gateway", "frontend", "traffic-manager")


def first_token_s(http: httpx.Client, prompt: list[int]) -> float:
    """From just before the request is sent to the first event that carries a token."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True
    start = time.perf_counter()
    times = []
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                times.append(time.perf_counter() - start)
    return times[0]


def test_overhead_of_a_one_block_prompt_and_size_of_control_processes(tmp_path: Path) -> None:
    """TTFT of 64 tokens over HTTP minus the same prefill in this process, interleaved; 30 layers, so 30 hand-overs."""
    model = tiny_model(tmp_path, "llama", num_hidden_layers=30, hidden_size=192, intermediate_size=512)
    reference = Reference(model)
    rng = random.Random(0)
    cluster, alone = [], []
    with launched(tmp_path, "up", "--prefill", "1", "--decode", "1", "--model", str(model), "--port", "0") as run:
        with httpx.Client(base_url=url_of(run), timeout=30) as http:
            for index in range(ROUNDS):
                prompt = [rng.randrange(3, 500) for _ in range(64)]
                ttft = first_token_s(http, prompt)
                start = time.perf_counter()
                reference.greedy(prompt, 1)
                if index >= 10:  # both are warm by then
                    alone.append(time.perf_counter() - start)
                    cluster.append(ttft)
        weights = {}
        for pid, command in run.processes().items():
            for role in CONTROL_ROLES:
                if f"services.serve {role}" in command:
                    weights.setdefault(role, []).append(anonymous_and_files(pid))
    overhead = [together - single for together, single in zip(cluster, alone, strict=True)]
    print(f"\nTTFT of one block: cluster p50 {statistics.median(cluster) * 1e3:.1f} ms,", end=" ")
    print(f"one process p50 {statistics.median(alone) * 1e3:.1f} ms,", end=" ")
    print(f"overhead p50 {statistics.median(overhead) * 1e3:.1f} ms (target: under 15)")
    for role, sizes in weights.items():
        print(f"{role}: {max(sizes) / 1e6:.1f} MB besides registered memory (target: under 80)")


def anonymous_and_files(pid: int) -> int:
    """Resident bytes but for shared memory, which is registered buffers."""
    info = psutil.Process(pid)
    shared = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(info.memory_info().rss) - int(shared.split()[1]) * 1024


@pytest.mark.parametrize(("read_side", "hops"), [("pe_only", 3), ("de_only", 2)])
async def test_copies_of_a_kv_byte(tmp_path: Path, read_side: str, hops: int) -> None:
    """Bytes moved inside and between nodes per byte of KV that a decode engine gets, against the hops of spec §4.

    PE path: hit bytes go buffer -> PE device -> DE buffer -> DE device; DE path: buffer -> PE device and buffer -> DE
    device. Miss bytes go PE device -> DE buffer -> DE device on both.
    """
    model = tiny_model(tmp_path, "llama")
    rng = random.Random(0)
    base = [rng.randrange(3, 500) for _ in range(960)]
    config = cluster_config(model, tmp_path / "blocks", scheduler__read_side=read_side)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        await cluster.quiet()
        names = [f"kv_bytes_total{{hop={hop}}}" for hop in ("load", "push", "handoff", "keep", "h2d")]
        before = sum(map(cluster.counter, names))
        outcome = await cluster.driver.generate([*base, *base[:64]], 2)
        await cluster.quiet()
        moved = (sum(map(cluster.counter, names)) - before) / cluster.prefill().geometry.bytes_per_token
        needed = outcome.cached_tokens * hops + outcome.computed_tokens * 2
        print(f"\n{read_side}: {moved / (960 + 64):.3f} copies a KV byte, spec §4 has {needed / (960 + 64):.3f}")
        assert moved == needed
