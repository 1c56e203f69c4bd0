"""Profiled models: compute is only timed, KV really moves; all else is as with a real model (design: Compute)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from common.clock import monotonic
from common.config import load_config
from common.errors import ConfigError
from common.messages import Meet
from common.types import Sampling
from services.engine.backend import Steps
from services.engine.lockstep import Rounds
from services.engine.profiled import ProfiledBackend
from tests.cluster import cluster_config, run_cluster
from tests.launch_harness import REPOSITORY

FAST = {"perf__time_factor": 0.1}


@pytest.mark.parametrize("read_side", ["pe_only", "de_only", "split"])
async def test_turns_move_their_kv(tmp_path, read_side):
    """Lengths, hits and bytes, by hand: 8 moved layers of 32 bytes a token, 16,384 bytes a block."""
    config = cluster_config("ds-27b", tmp_path, scheduler__read_side=read_side, **FAST)
    rng = random.Random(3)
    async with run_cluster(config) as cluster:
        first = await cluster.driver.generate([rng.randrange(1000) for _ in range(640)], 64)
        prompt = [rng.randrange(1000) for _ in range(640)]
        second = await cluster.driver.generate(prompt, 65)
        assert len(first.tokens) == 64 and first.cached_tokens == second.cached_tokens == 0
        third = await cluster.driver.generate([*prompt, *second.tokens, 1, 2, 3], 1)
        assert third.cached_tokens == 704  # 640 and the 64 whose KV was made when the 65th was sampled
        counts = [manager.metrics.snapshot() for manager in cluster.traffic_managers.values()]
        read = sum(count.get("storage_read_bytes_total", 0) for count in counts)
        assert read == 704 // 64 * 16_384
        assert cluster.prefill().backend.attention_s(704, 3) > 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_do_not_load_torch(role):
    """Nor transformers: what a profiled engine's process imports, and opens a back end with."""
    script = f"""
import asyncio, sys
from common.clock import monotonic
from common.config import load_config
from services.engine.service import open_backend
import services.{role}.service
config = load_config(None, {{"model.profile": "ds-660b", "{role}.device_memory": "1MiB"}})
async def main():
    backend = await open_backend(config, config.{role}, "x")
    await backend.close()
asyncio.run(main())
assert not {{"torch", "transformers"}} & set(sys.modules), "a profiled engine imports torch"
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=60)


def test_what_does_not_go_together_is_refused(tmp_path):
    for settings, words in (
        ({"model.path": str(tmp_path), "model.profile": "ds-660b"}, "both set"),
        ({"model.path": str(tmp_path), "network.transport": "null"}, "moves no KV"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, settings)


async def test_a_group_takes_the_time_of_the_slowest(tmp_path):
    """Two prefill engines in one group: whatever they compute together is counted once, by the leader."""
    config = cluster_config(
        "ds-660b", tmp_path, prefill__group="all", prefill__device_memory="16MiB", perf__time_factor=0.2
    )
    async with run_cluster(config, prefill=2) as cluster:
        prompts = [[index] * 3000 for index in range(8)]
        requests = [await cluster.driver.submit(cluster.driver.request(prompt, Sampling(1))) for prompt in prompts]
        for request in requests:
            await request.done.wait()
        engines = [cluster.prefill(index) for index in range(2)]
        spent = [engine.metrics.snapshot()["attention_seconds_total"] for engine in engines]
        leader = engines[0].metrics.snapshot()
        assert min(spent) > 0
        assert leader["group_attention_mean_seconds_total"] == pytest.approx(sum(spent) / 2)
        slowest = leader["group_attention_max_seconds_total"]
        assert leader["group_attention_mean_seconds_total"] <= slowest <= sum(spent) + 1e-9
        assert engines[1].metrics.snapshot()["group_attention_max_seconds_total"] == 0


def meet(engine):
    return Meet(engine, 0.1, 10)


def test_rounds():
    """a and b compute together; c comes in mid-round and waits for its end; who leaves holds nobody up."""
    rounds = Rounds()
    rounds.meet("a", meet("a"))
    rounds.meet("b", meet("b"))
    assert set(rounds.open()) == {"a", "b"}
    rounds.meet("c", meet("c"))
    assert rounds.open() == {}
    rounds.part("a", False)
    rounds.meet("a", meet("a"))
    assert rounds.open() == {}
    rounds.forget("b")
    assert set(rounds.open()) == {"a", "c"}
    rounds.part("a", False)
    rounds.forget("c")
    assert rounds.open() == {} and not rounds.computing


async def test_a_forward_that_waited_for_its_round_computes_only_then(tmp_path):
    """Its layers were loaded long before: that time was not spent on them. 0.1 s of compute ends 0.1 s after the round
    begins, by the schedule."""
    config = load_config(None, {"model.profile": "ds-27b", "prefill.device_memory": "1MiB"})
    backend = ProfiledBackend(config, config.prefill, "engine")
    steps = Steps(8, 4, lambda step: None, 10.0)
    for step in range(len(steps)):
        steps.open(step)
    await asyncio.sleep(0.2)
    begun = monotonic()
    await backend._pass_steps(steps, 0.1)
    await backend.close()
    assert backend._busy_until - begun >= 0.1
