"""Several forwards at a time in one traffic manager: each in device memory of its own, each with its own fate."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DualPathError, ErrorCode
from common.faults import Fault
from services.traffic_manager.forward import Forward
from tests.cluster import cluster_config, random_prompt, run_cluster


@pytest.fixture
def at_once(monkeypatch):
    """The most forwards that a traffic manager had in hand at a time, in a list of one."""
    running, most = set(), [0]
    run = Forward.run

    async def counted(self):
        running.add(self)
        most[0] = max(most[0], len(running))
        try:
            return await run(self)
        finally:
            running.discard(self)

    monkeypatch.setattr(Forward, "run", counted)
    return most


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("read_side", ["pe_only", "de_only", "split"])
async def test_tokens(model, reference, tmp_path, at_once, read_side, transport, layerwise):
    """Hits, misses and chunks of many requests, all layers or a few at a time."""
    base = random_prompt(1, 256)
    prompts = [base[: 64 * (seed % 5)] + random_prompt(seed, 40 + seed) for seed in range(10)]
    config = cluster_config(
        model, tmp_path, scheduler__read_side=read_side, network__transport=transport, prefill__layerwise=layerwise,
        prefill__max_batch_tokens=128,
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        outcomes = await asyncio.gather(*(cluster.driver.generate(prompt, 5) for prompt in prompts))
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.tokens == reference.greedy(prompt, 5)
        assert at_once[0] > 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("read_side", ["pe_only", "de_only", "split"])
async def test_a_chunk_is_begun_while_the_one_before_it_is_in_hand(
    model, reference, tmp_path, at_once, read_side, transport
):
    """One request, alone: of each layer the next chunk must load what this one is about to leave."""
    base = random_prompt(3, 256)
    prompt = base + random_prompt(4, 500)
    config = cluster_config(
        model, tmp_path, scheduler__read_side=read_side, network__transport=transport, prefill__max_batch_tokens=64,
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        outcome = await cluster.driver.generate(prompt, 5)
        assert outcome.tokens == reference.greedy(prompt, 5)
        assert at_once[0] > 1


async def test_a_chunk_that_is_lost_takes_the_next_one_along(model, reference, tmp_path, at_once):
    """A push of earlier rows is not answered: that request fails, the next one does not, and nothing is kept."""
    lost = Fault(point="message", action="drop", type="PushRows", after=4)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="de_only", prefill__max_batch_tokens=64, timeouts__transfer_s=2.0,
        faults=[lost],
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.generate(random_prompt(6, 600), 5)
        assert failure.value.code is ErrorCode.TRANSFER_FAILED
        prompt = random_prompt(7, 600)
        assert (await cluster.driver.generate(prompt, 5)).tokens == reference.greedy(prompt, 5)
        assert at_once[0] > 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_push_in_doubt_does_not_touch_the_forwards_around(model, reference, tmp_path, at_once, transport):
    """One of many is never answered: its request fails, and no other."""
    base = random_prompt(2, 192)
    prompts = [base + random_prompt(seed, 30) for seed in range(8)]
    lost = Fault(point="message", action="drop", type="PushRows", after=3)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="de_only", network__transport=transport, prefill__layerwise=False,
        prefill__max_batch_tokens=64, timeouts__transfer_s=2.0, faults=[lost],
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        outcomes = await asyncio.gather(
            *(cluster.driver.generate(prompt, 5) for prompt in prompts), return_exceptions=True
        )
        failed = [outcome for outcome in outcomes if isinstance(outcome, DualPathError)]
        assert [error.code for error in failed] == [ErrorCode.TRANSFER_FAILED]
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                assert outcome.tokens == reference.greedy(prompt, 5)
        assert at_once[0] > 1
