"""The real system on a fabric: every process in its node's namespace, control messages under keys made for the run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.cluster import Process, Processes
from common.config import Config
from common.rundir import RunDirectory
from common.types import Role
from compose.fabric import Fabric
from services.engine.torch_backend.reference import Reference
from services.launcher.status import get_status, read_bytes
from tests.cluster import cluster_config
from tests.fabric_support import need_fabric
from tests.models import tiny_model

pytestmark = pytest.mark.fabric

PLACES = {
    "scheduler": (Role.SCHEDULER, "ctl"),
    "frontend": (Role.FRONTEND, "ctl"),
    "gateway": (Role.STORAGE_GATEWAY, "store"),
    "prefill-0": (Role.PREFILL, "p0"),
    "decode-0": (Role.DECODE, "d0"),
}
BLOCK_TOKENS = 64


def wire_bytes(fabric: Fabric) -> Counter[tuple[str, ...]]:
    """By node, NIC, direction and class."""
    counters = fabric.stats()
    return Counter({(at.node, at.nic, at.direction, at.traffic_class): at.bytes for at in counters})


async def storage_bytes(config: Config) -> dict[str, int]:
    """Bytes that p0 and d0 have read from storage, once their counters stand still."""
    async with asyncio.timeout(20):
        last: dict[str, int] = {}
        while True:
            await asyncio.sleep(2 * config.timeouts.heartbeat_s)
            status = await get_status(config)
            now = read_bytes(status)
            if now == last and not status.running:
                return now
            last = now


@pytest.mark.timeout(170)
async def test_tokens_are_the_reference_s_and_storage_bytes_are_those_on_the_wire(tmp_path: Path) -> None:
    need_fabric()
    model = tiny_model(tmp_path / "models")
    reference = Reference(model)
    prompt = random.Random(5).choices(range(3, 500), k=10 * BLOCK_TOKENS + 5)

    with RunDirectory() as run, Fabric.up(1, 1, 20_000_000, 160_000_000) as fabric:

        def configured(node: str) -> Config:
            own: dict[str, Any] = {name.replace(".", "__"): value for name, value in fabric.settings(node).items()}
            return cluster_config(model, tmp_path / "blocks", scheduler__read_side="round_robin", **own)

        config = configured("ctl")
        processes = {
            name: Process(role, configured(node), tuple(fabric.prefix(node))) for name, (role, node) in PLACES.items()
        }
        async with Processes(processes, run) as cluster, httpx.AsyncClient(base_url=fabric.url, timeout=60) as http:
            assert cluster.url == fabric.url
            before = wire_bytes(fabric)
            cached = []
            for _ in range(5):
                body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
                answer = (await http.post("/v1/completions", json=body | {"return_token_ids": True})).json()
                tokens = answer["choices"][0]["token_ids"]
                assert tokens == reference.greedy(prompt, 3)
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                prompt = prompt + tokens
                await asyncio.sleep(0.5)  # what has been persisted is a hit of the next turn
            read = await storage_bytes(config)
            wire = wire_bytes(fabric) - before

    assert cached == [0, *[10 * BLOCK_TOKENS] * 4]
    assert set(read) == {"p0", "d0"} and all(read.values()), "round robin reads on both sides"
    block_bytes = sum(read.values()) // 40
    for node, num_bytes in read.items():
        received = wire[(node, "snic", "rx", "high")]
        assert num_bytes < received < 1.1 * num_bytes + 100_000, "what is read, its headers, and few messages"
    assert wire[("d0", "snic", "tx", "high")] > 10 * block_bytes, "what is persisted"
    delivered, pushed = wire[("p0", "cnic", "tx", "low")], wire[("d0", "cnic", "tx", "low")]
    assert delivered > 10 * block_bytes, "the first turn's KV at least"
    assert pushed > read["d0"], "what a decode node reads goes to the prefill node once more"
    assert wire[("p0", "cnic", "rx", "low")] >= pushed * 0.99
    assert 0 < wire[("p0", "cnic", "tx", "high")] < delivered, "control messages are in the other class"
