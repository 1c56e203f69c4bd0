"""Whole clusters whose KV moves by RDMA: tokens equal a single-process run, on separate storage and compute NICs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.auth

from services.engine.torch_backend.reference import Reference
from tests.cluster import Cluster, cluster_config, random_prompt, run_cluster
from tests.models import tiny_model
from tests.rdma_support import RAILS, needs_rdma

pytestmark = needs_rdma


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), request.param)


@asynccontextmanager
async def _cluster(model: Path, directory: Path, read_side: str) -> AsyncIterator[Cluster]:
    """Storage gateway and decode engine at the one end of both cables, the prefill engine at the other."""
    storage, compute = RAILS[0], RAILS[-1]
    keys = directory / "keys"
    keys.mkdir()
    zmq.auth.create_certificates(keys, "cluster")
    config = cluster_config(
        model,
        directory / "blocks",
        scheduler__read_side=read_side,
        network__transport="verbs",
        network__snic=storage[1],
        network__cnic=compute[1],
        security__curve_dir=str(keys),
        timeouts__lookup_s=5.0,
        timeouts__heartbeat_timeout_s=30.0,
    )
    async with run_cluster(config, prefill=0, decode=1) as cluster:
        network = cluster.config.network.model_copy(update={"snic": storage[0], "cnic": compute[0]})
        await cluster.add_engine("prefill-0", cluster.config.model_copy(update={"network": network}))
        yield cluster


@pytest.mark.parametrize("read_side", ["pe_only", "de_only", "split"])
async def test_tokens_are_those_of_one_process(
    model: Path, reference: Reference, tmp_path: Path, read_side: str
) -> None:
    """Cold, hit, and side by side; every byte between processes of different nodes goes by RDMA."""
    rng = random.Random(read_side)
    base = random_prompt(rng, 330)
    prompts = [
        base,
        base,
        base[:200] + random_prompt(rng, 50),
        *(base[: 64 * n] + random_prompt(rng, 9) for n in (1, 3)),
    ]
    async with _cluster(model, tmp_path, read_side) as cluster:
        for prompt in prompts[:2]:
            assert (await cluster.driver.generate(prompt, 5)).tokens == reference.greedy(prompt, 5)
        outcomes = await asyncio.gather(*(cluster.driver.generate(prompt, 8) for prompt in prompts[2:]))
        for prompt, outcome in zip(prompts[2:], outcomes, strict=True):
            assert outcome.tokens == reference.greedy(prompt, 8)
            assert outcome.cached_tokens > 0
        moved = [name for manager in cluster.traffic_managers.values() for name in manager.metrics.snapshot()]
        assert any("transport=verbs" in name for name in moved)
        assert not any(f"transport={other}" in name for other in ("tcp", "shm") for name in moved)
        assert cluster.gateway.metrics.snapshot()["rdma_writes_total{traffic_class=kv}"] > 0
