"""The oracle: greedy tokens equal a single-process transformers run, on every path, hit length, batch and chunking."""

from __future__ import annotations

import asyncio
import random

import pytest

from common.faults import Fault
from common.types import Sampling, hit_block_limit
from services.engine.torch_backend.memory import TensorMemory
from services.engine.torch_backend.reference import Reference
from tests.cluster import cluster_config, random_prompt, run_cluster
from tests.models import EOS_ID, FAMILIES, tiny_model

PREFIXES = (0, 1, 63, 64, 65, 127, 128, 640, 641)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> (directory, reference), loaded once."""
    root = tmp_path_factory.mktemp("models")
    loaded = {}

    def get(family):
        if family not in loaded:
            directory = tiny_model(root, family)
            loaded[family] = (directory, Reference(directory))
        return loaded[family]

    return get


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_shared_prefixes(models, tmp_path, family, read_side):
    """Every prefix length, unchunked and with both sides of each block border."""
    directory, reference = models(family)
    rng = random.Random(family)
    base = random_prompt(rng, 700)
    async with run_cluster(cluster_config(directory, tmp_path, scheduler__read_side=read_side)) as cluster:
        assert (await cluster.driver.generate(base, 3)).tokens == reference.greedy(base, 3)
        for shared in PREFIXES:
            tail = [(base[shared] + 1) % 400 + 3, *random_prompt(rng, 20)]
            prompt = base[:shared] + tail
            outcome = await cluster.driver.generate(prompt, 6)
            assert outcome.tokens == reference.greedy(prompt, 6), f"prefix {shared}"
            assert outcome.cached_tokens == 64 * (min(shared, len(prompt) - 1) // 64)
            assert outcome.cached_tokens + outcome.computed_tokens == len(prompt)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_repeated_whole_prompts(models, tmp_path, read_side, transport):
    """A06: the same prompt twice computes at least one token and gives the same ids."""
    directory, reference = models("llama")
    rng = random.Random(read_side)
    config = cluster_config(directory, tmp_path, scheduler__read_side=read_side, network__transport=transport)
    async with run_cluster(config) as cluster:
        for length in (64, 65, 127, 128, 640, 641):
            prompt = random_prompt(rng, length)
            expected = reference.greedy(prompt, 5)
            first, second = [await cluster.driver.generate(prompt, 5) for _ in range(2)]
            assert first.tokens == second.tokens == expected
            assert first.cached_tokens == 0
            assert second.cached_tokens == 64 * hit_block_limit(length, 64)
            assert second.computed_tokens >= 1


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
@pytest.mark.parametrize("batch_tokens", [64, 100, 192])
async def test_chunked_prefill(models, tmp_path, read_side, batch_tokens):
    """A34: any budget, with and without hits, computes every token once and gives the same ids."""
    directory, reference = models("qwen3")
    rng = random.Random(batch_tokens)
    config = cluster_config(
        directory, tmp_path, scheduler__read_side=read_side, prefill__max_batch_tokens=batch_tokens
    )
    async with run_cluster(config) as cluster:
        base = random_prompt(rng, 450)
        for prompt in (base, base[:300] + random_prompt(rng, 331), base):
            assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


@pytest.mark.parametrize("read_side", ["round_robin", "shorter_queue"])
async def test_concurrent_requests_on_two_by_two(models, tmp_path, read_side):
    """Batched together, chunked, over both paths and several engines: batch composition changes nothing."""
    directory, reference = models("qwen2")
    rng = random.Random(7)
    base = random_prompt(rng, 320)
    prompts = [base[: rng.choice((0, 64, 130, 320))] + random_prompt(rng, rng.randint(1, 120)) for _ in range(16)]
    config = cluster_config(directory, tmp_path, scheduler__read_side=read_side, prefill__max_batch_tokens=256)
    async with run_cluster(config, prefill=2, decode=2) as cluster:
        await cluster.driver.generate(base, 1)
        outcomes = await asyncio.gather(*(cluster.driver.generate(prompt, 12) for prompt in prompts))
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.tokens == reference.greedy(prompt, 12)
        used = [name for name in cluster.traffic_managers if cluster.counter("storage_read_bytes_total", name)]
        assert any(name.startswith("prefill") for name in used) and any(name.startswith("decode") for name in used)


async def test_turns_of_an_agent_hit_what_earlier_turns_generated(models, tmp_path):
    """Generated blocks are persisted as they fill; the next turn finds them, and so does a new cluster."""
    directory, reference = models("llama")
    rng = random.Random(3)
    history: list[int] = []
    config = cluster_config(directory, tmp_path)
    for turns in (4, 2):  # the second round after a full restart
        async with run_cluster(config, decode=2) as cluster:
            for _ in range(turns):
                known = max(len(history) - 1, 0)  # the last token's KV was never computed
                prompt = history + random_prompt(rng, 50)
                outcome = await cluster.driver.generate(prompt, 70)
                assert outcome.tokens == reference.greedy(prompt, 70)
                assert outcome.cached_tokens == 64 * (known // 64)
                history = prompt + outcome.tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
async def test_output_lengths(models, tmp_path, max_tokens):
    """A22: exact lengths, the first token included; a one-token request is persisted as well."""
    directory, reference = models("llama")
    prompt = random_prompt(random.Random(max_tokens), 130)
    async with run_cluster(cluster_config(directory, tmp_path)) as cluster:
        outcome = await cluster.driver.generate(prompt, max_tokens)
        assert outcome.tokens == reference.greedy(prompt, max_tokens)
        assert outcome.finished.num_tokens == max_tokens
        assert (await cluster.driver.generate(prompt, max_tokens)).cached_tokens == 128


async def test_end_of_sequence(models, tmp_path):
    """The end token ends a request unless it is ignored or min_tokens forbids it (A21)."""
    directory, reference = models("llama")
    rng = random.Random(5)
    async with run_cluster(cluster_config(directory, tmp_path)) as cluster:
        driver = cluster.driver
        prompt = random_prompt(rng, 40)
        tokens = reference.greedy(prompt, 20)
        stop = tokens[7]
        outcome = await driver.generate(prompt, 20, ignore_eos=False, stop_token_ids=(stop,))
        assert outcome.tokens == tokens[: tokens.index(stop) + 1]
        assert outcome.finished.reason == "stop"
        outcome = await driver.generate(prompt, 20, ignore_eos=False, stop_token_ids=(stop,), min_tokens=15)
        assert len(outcome.tokens) >= 15 and stop not in outcome.tokens[:14]
        assert EOS_ID not in (await driver.generate(prompt, 20, ignore_eos=False, min_tokens=20)).tokens[:19]


async def test_sampled_tokens_do_not_depend_on_the_path_or_the_attempt(models, tmp_path):
    """Counter-based seeds: another engine, a hit instead of a miss, or a continuation give the same tokens."""
    directory, _ = models("llama")
    prompt = random_prompt(random.Random(11), 200)
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 1234}
    async with run_cluster(cluster_config(directory, tmp_path), decode=2) as cluster:
        driver = cluster.driver
        runs = [(await driver.generate(prompt, 24, **sampling)).tokens for _ in range(3)]
        assert runs[0] == runs[1] == runs[2]
        other = await driver.generate(prompt, 24, **{**sampling, "seed": 99})
        assert other.tokens != runs[0]
        rest = await driver.submit(
            driver.request(prompt + runs[0][:10], Sampling(24, ignore_eos=True, **sampling), generated=10, attempt=1)
        )
        async with asyncio.timeout(30):
            await rest.done.wait()
        assert rest.tokens == runs[0][10:]


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_device_memory_apart_from_the_segment(models, tmp_path, read_side, monkeypatch):
    """As on a GPU: tensors are a mirror, and whatever is not pulled or pushed in time gives wrong tokens."""
    build = TensorMemory.__init__

    def mirrored(self, *args):
        build(self, *args)
        self._elems = self._host.clone().fill_(float("nan"))

    monkeypatch.setattr(TensorMemory, "__init__", mirrored)
    directory, reference = models("llama")
    rng = random.Random(13)
    history: list[int] = []
    config = cluster_config(directory, tmp_path, scheduler__read_side=read_side, prefill__max_batch_tokens=128)
    async with run_cluster(config) as cluster:
        assert cluster.decode().memory.mirrored
        for _ in range(3):
            prompt = history + random_prompt(rng, 150)
            outcome = await cluster.driver.generate(prompt, 70)
            assert outcome.tokens == reference.greedy(prompt, 70)
            assert outcome.cached_tokens == 64 * (max(len(history) - 1, 0) // 64)
            history = prompt + outcome.tokens


async def test_a_turn_ends_only_when_all_of_its_blocks_are_announced(models, tmp_path):
    """Also a block that filled some steps before the last one, and whose announcement is slow."""
    directory, reference = models("llama")
    slow = Fault(point="message", action="delay", type="PersistPages", seconds=0.5)
    prompt = random_prompt(random.Random(17), 60)
    async with run_cluster(cluster_config(directory, tmp_path, faults=[slow])) as cluster:
        first = await cluster.driver.generate(prompt, 8)
        history = prompt + first.tokens
        assert (await cluster.driver.generate(history, 2)).cached_tokens == 64
        assert first.tokens == reference.greedy(prompt, 8)
