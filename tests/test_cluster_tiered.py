"""The tiered system (spec §9): blocks that a prefill node has read are found in its DRAM tier the next time."""

from __future__ import annotations

import asyncio
import random

import pytest

from common.types import Sampling
from tests.cluster import cluster_config, random_prompt, run_cluster
from tests.test_cluster_bytes import measure
from tests.test_cluster_faults import corrupt_one_byte

BLOCK = 4 * 64 * 2 * 2 * 16 * 4  # bytes: layers, tokens, K and V, heads, width, float32


def tiered(model, blocks_dir, tier_blocks, **overrides):
    return cluster_config(
        model, blocks_dir, scheduler__read_side="pe_only", storage__tier=tier_blocks * BLOCK, **overrides
    )


def tier_hits(cluster):
    return cluster.counter("tier_hit_tokens_total", "prefill-0")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("budget", [64, 512])
async def test_only_what_is_missing_is_read(model, reference, tmp_path, transport, budget):
    base = random_prompt(1, 256)
    config = tiered(model, tmp_path, 8, network__transport=transport, prefill__max_batch_tokens=budget)
    async with run_cluster(config) as cluster:
        assert cluster.prefill()._capacity.buffer_blocks == (8 << 20) // BLOCK
        await cluster.driver.generate(base[:130], 1)
        for prompt, read, hits in (
            (base[:190], 128, 0),  # stored, and never read here
            ([*base, 7], 0, 128),  # 192 tokens were computed here, 128 of them read and kept
            ([*base, 8], 256 - 128, 128),
            ([*base, 9], 0, 256),
        ):
            before = tier_hits(cluster)
            outcome, prefill, decode = await measure(cluster, prompt, 3)
            assert outcome.tokens == reference.greedy(prompt, 3)
            assert (prefill["read"], tier_hits(cluster) - before, decode["read"]) == (read, hits, 0)
            assert outcome.cached_tokens == read + hits


async def test_a_small_tier_keeps_the_first_blocks_of_the_latest(model, reference, tmp_path):
    first, second = random_prompt(2, 300), random_prompt(3, 300)
    async with run_cluster(tiered(model, tmp_path, 3)) as cluster:
        for prompt in (first, second):
            await cluster.driver.generate(prompt, 1)
        for prompt, read in ((first, 256), (first, 64), (second, 256), (second, 64), (first, 256)):
            outcome, prefill, _ = await measure(cluster, prompt, 3)
            assert outcome.tokens == reference.greedy(prompt, 3)
            assert outcome.cached_tokens == 256 and prefill["read"] == read


async def test_a_kept_block_outlives_its_file(model, reference, tmp_path):
    """The tier holds what was verified when it was read; what has to be read and is bad is computed."""
    prompt = random_prompt(4, 400)
    async with run_cluster(tiered(model, tmp_path, 2, prefill__max_batch_tokens=128)) as cluster:
        for _ in range(2):
            await cluster.driver.generate(prompt, 1)
            await cluster.quiet()
        corrupt_one_byte(tmp_path)
        outcome = await cluster.driver.generate(prompt, 6)
        assert outcome.cached_tokens == 128 and outcome.tokens == reference.greedy(prompt, 6)
        await cluster.quiet()
        assert (await cluster.driver.generate(prompt, 6)).tokens == reference.greedy(prompt, 6)


async def test_shared_by_many_at_a_time_some_of_them_cancelled(model, reference, tmp_path):
    rng = random.Random(5)
    base = random_prompt(6, 320)
    async with run_cluster(tiered(model, tmp_path, 4, prefill__max_batch_tokens=128)) as cluster:
        driver = cluster.driver
        await driver.generate(base, 1)

        async def one(index):
            prompt = base[: 64 * rng.randint(1, 5)] + random_prompt(index, rng.randint(1, 60))
            request = driver.request(prompt, Sampling(4, ignore_eos=True))
            outcome = await driver.submit(request)
            if index % 3 == 0:
                await asyncio.sleep(rng.random() * 0.2)
                driver.cancel(request)
                return
            async with asyncio.timeout(60):
                await outcome.done.wait()
            assert outcome.tokens == reference.greedy(prompt, 4)

        for start in (0, 12, 24):
            await asyncio.gather(*(one(start + index) for index in range(12)))
        await cluster.quiet()
        tier = cluster.traffic_managers["prefill-0"].tier
        assert len(tier) == 4 and tier_hits(cluster) > 0
