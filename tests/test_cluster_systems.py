"""Every system of the comparison that moves KV (spec §9) gives the tokens of a single process, turn after turn."""

from __future__ import annotations

import random

import pytest

from common.types import Sampling
from tests.cluster import cluster_config, random_prompt, run_cluster

#: read side and layerwise prefill of: basic, basic+layerwise, +dual, dualpath, dualpath+split.
SYSTEMS = [
    ("pe_only", False),
    ("pe_only", True),
    ("round_robin", True),
    ("shorter_queue", True),
    ("split", True),
]


@pytest.mark.parametrize("batch_tokens", [512, 128])
@pytest.mark.parametrize(("read_side", "layerwise"), SYSTEMS)
async def test_turns_of_a_session(model, reference, tmp_path, read_side, layerwise, batch_tokens):
    rng = random.Random(5)
    config = cluster_config(
        model,
        tmp_path,
        scheduler__read_side=read_side,
        prefill__layerwise=layerwise,
        prefill__max_batch_tokens=batch_tokens,
    )
    history: list[int] = []
    async with run_cluster(config) as cluster:
        for _ in range(4):
            prompt = history + random_prompt(rng, 250)
            outcome = await cluster.driver.generate(prompt, 40)
            assert outcome.tokens == reference.greedy(prompt, 40)
            assert outcome.cached_tokens == 64 * (max(len(history) - 1, 0) // 64)
            history = prompt + outcome.tokens


async def test_resident_requests_share_device_memory(model, reference, tmp_path):
    """Three fit at a time, of twelve, half of which are cancelled: whoever has the memory gives it back."""
    rng = random.Random(7)
    prompts = [random_prompt(rng, 200) for _ in range(12)]
    config = cluster_config(
        model, tmp_path, prefill__layerwise=False, scheduler__read_side="pe_only", prefill__device_memory="640KiB"
    )
    async with run_cluster(config) as cluster:
        driver = cluster.driver
        requests = [driver.request(prompt, Sampling(5, ignore_eos=True)) for prompt in prompts]
        outcomes = [await driver.submit(request) for request in requests]
        for request in requests[1::2]:
            driver.cancel(request)
        for prompt, outcome in zip(prompts[::2], outcomes[::2], strict=True):
            await outcome.done.wait()
            assert outcome.tokens == reference.greedy(prompt, 5)
        assert cluster.prefill().memory.peak_bytes <= 640 << 10
