"""Every hop of spec §4 counted in bytes, and the device memory that layerwise prefill needs."""

from __future__ import annotations

import random

import pytest

from tests.cluster import VOCAB, cluster_config, run_cluster
from tests.models import tiny_model

HOPS = ("load", "push", "handoff", "keep", "h2d")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama", num_hidden_layers=6)


def snapshot(cluster, engine):
    names = {hop: f"kv_bytes_total{{hop={hop}}}" for hop in HOPS}
    names |= {"read": "storage_read_bytes_total", "written": "storage_write_bytes_total"}
    return {short: cluster.counter(name, engine) for short, name in names.items()}


async def measure(cluster, prompt, max_tokens):
    """What one request moves, per engine, in tokens (bytes over bytes per token)."""
    per_token = cluster.prefill().geometry.bytes_per_token
    await cluster.quiet()
    before = {engine: snapshot(cluster, engine) for engine in cluster.engines}
    outcome = await cluster.driver.generate(prompt, max_tokens)
    await cluster.quiet()
    after = {engine: snapshot(cluster, engine) for engine in cluster.engines}
    moved = {
        engine: {name: (after[engine][name] - before[engine][name]) / per_token for name in after[engine]}
        for engine in after
    }
    return outcome, moved["prefill-0"], moved["decode-0"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pe_path_unchunked(model, tmp_path, transport):
    """Storage -> PE buffer once, PE buffer -> PE HBM once, hits and misses -> DE buffer once, -> DE HBM once."""
    rng = random.Random(1)
    base = [rng.choice(VOCAB) for _ in range(256)]
    prompt = base + [rng.choice(VOCAB) for _ in range(30)]
    config = cluster_config(model, tmp_path, scheduler__read_side="pe_only", network__transport=transport)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        outcome, prefill, decode = await measure(cluster, prompt, 2)
        assert outcome.cached_tokens == 256
        assert prefill == {"read": 256, "written": 0, "load": 256, "push": 0, "handoff": 286, "keep": 0, "h2d": 0}
        assert decode == {"read": 0, "written": 0, "load": 0, "push": 0, "handoff": 0, "keep": 0, "h2d": 5 * 64}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_de_path_unchunked(model, tmp_path, transport):
    """Hit KV crosses storage once, on the DE side, and the compute network once; only miss KV comes back."""
    rng = random.Random(2)
    base = [rng.choice(VOCAB) for _ in range(256)]
    prompt = base + [rng.choice(VOCAB) for _ in range(100)]
    config = cluster_config(model, tmp_path, scheduler__read_side="de_only", network__transport=transport)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        outcome, prefill, decode = await measure(cluster, prompt, 2)
        assert outcome.cached_tokens == 256
        assert prefill == {"read": 0, "written": 0, "load": 0, "push": 0, "handoff": 100, "keep": 0, "h2d": 0}
        assert decode == {"read": 256, "written": 64, "load": 0, "push": 256, "handoff": 0, "keep": 0, "h2d": 6 * 64}


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_n_chunks_move_cached_kv_n_times(model, tmp_path, read_side):
    """Each chunk loads the hits and the earlier chunks again (spec §4); storage is read once all the same."""
    rng = random.Random(3)
    base = [rng.choice(VOCAB) for _ in range(128)]
    prompt = base + [rng.choice(VOCAB) for _ in range(64 * 3)]
    config = cluster_config(model, tmp_path, scheduler__read_side=read_side, prefill__max_batch_tokens=64)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        _, prefill, decode = await measure(cluster, prompt, 2)
        reloaded = 128 + (128 + 64) + (128 + 2 * 64)
        if read_side == "pe_only":
            assert prefill["read"] == 128 and prefill["load"] == reloaded
            assert prefill["keep"] == 2 * 64 and prefill["handoff"] == len(prompt)
            assert decode["push"] == 0
        else:
            assert decode["read"] == 128 and decode["push"] == reloaded
            assert prefill["load"] == prefill["keep"] == 0 and prefill["handoff"] == 3 * 64


async def test_generated_blocks_are_persisted_as_they_fill(model, tmp_path):
    """Prompt misses from the buffer, generated blocks from pages; nothing twice, no partial block."""
    prompt = [3 + i % 400 for i in range(100)]
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        _, _, decode = await measure(cluster, prompt, 100)  # KV of 199 tokens: blocks 0, 1 and 2
        assert decode["written"] == 3 * 64
        _, _, decode = await measure(cluster, prompt, 100)
        assert decode["written"] == 0


async def test_layerwise_prefill_fits_where_all_layers_do_not(model, reference, tmp_path):
    """Device memory for two layers of the context, not for six: prefill succeeds, and the peak is within the budget."""
    rng = random.Random(4)
    base = [rng.choice(VOCAB) for _ in range(512)]
    prompt = base + [rng.choice(VOCAB) for _ in range(88)]
    row = 2 * 2 * 16 * 4
    budget = int(2.5 * 600 * row)
    assert budget < 6 * 600 * row
    config = cluster_config(model, tmp_path, prefill__device_memory=budget, prefill__resident_layers=4)
    async with run_cluster(config) as cluster:
        for tokens in (base, prompt):
            assert (await cluster.driver.generate(tokens, 4)).tokens == reference.greedy(tokens, 4)
        memory = cluster.prefill().memory
        assert 2 * 600 * row <= memory.peak_bytes <= budget


async def test_at_most_the_configured_layers_are_resident(model, tmp_path):
    prompt = [3 + i % 400 for i in range(300)]
    config = cluster_config(model, tmp_path, prefill__resident_layers=2)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        memory = cluster.prefill().memory
        assert memory.peak_bytes == 2 * 300 * cluster.prefill().geometry.row_bytes


async def test_context_limit_follows_from_the_memory(model, tmp_path):
    """A32d: the limit that an engine registers is what its pools can hold."""
    row = 2 * 2 * 16 * 4
    config = cluster_config(model, tmp_path, prefill__device_memory=2 * 300 * row, decode__buffer=6 * 64 * 10 * row)
    async with run_cluster(config) as cluster:
        assert cluster.prefill().max_context_tokens == 300
        assert cluster.decode().max_context_tokens == 9 * 64  # one of ten blocks is kept for persisting
