"""Several forwards at a time in one traffic manager: each in device memory of its own, each with its own fate."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from common.errors import DualPathError, ErrorCode
from common.faults import Fault
from common.types import Sampling
from services.traffic_manager.forward import Forward
from services.traffic_manager.hops import Hop, Hops
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


async def test_forwards_that_have_ended_are_forgotten(model, tmp_path, monkeypatch, at_once):
    """Each of these begins while the one before it is in hand: none keeps those before it."""
    ended, most, run = weakref.WeakSet(), [0], Forward.run

    async def counted(self):
        delivered = await run(self)
        ended.add(self)
        most[0] = max(most[0], len(ended))
        return delivered

    monkeypatch.setattr(Forward, "run", counted)
    config = cluster_config(model, tmp_path, prefill__max_batch_tokens=64)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(random_prompt(8, 900), 1)
        assert at_once[0] > 1
        assert most[0] < 6 < cluster.prefill().forwards.num_begun


@pytest.mark.parametrize("state", ["_load", "_follow", "_send"])
@pytest.mark.parametrize("read_side", ["pe_only", "de_only", "split"])
async def test_cancelled_between_two_chunks_in_hand(model, reference, tmp_path, monkeypatch, read_side, state):
    """Whatever the earlier or the later of the two is about to do then: nothing is kept, nobody else is disturbed."""
    reached, method = [], getattr(Forward, state)

    async def cancelled_here(self, layers, *rest):
        sequence = self._sequences[0]
        several = len(cluster.traffic_managers["prefill-0"]._forwards) > 1
        if not reached and several and sequence.staged.key[0] == "gone":
            reached.append(self)
            cluster.driver.cancel(request)
            async with asyncio.timeout(10):
                while not sequence.staged.released:
                    await asyncio.sleep(0.001)
        return await method(self, layers, *rest)

    monkeypatch.setattr(Forward, state, cancelled_here)
    base, sampling = random_prompt(9, 192), Sampling(5, ignore_eos=True)
    config = cluster_config(model, tmp_path, scheduler__read_side=read_side, prefill__max_batch_tokens=64)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(base, 1)
        request = cluster.driver.request(base + random_prompt(10, 500), sampling, id="gone")
        outcome = await cluster.driver.submit(request)
        prompt = base + random_prompt(11, 300)
        assert (await cluster.driver.generate(prompt, 5)).tokens == reference.greedy(prompt, 5)
        await cluster.quiet()
        assert reached and not outcome.tokens
        assert not cluster.prefill().forwards.in_hand
        cluster.prefill().check_integrity()
        assert cluster.prefill().forwards.pool.used == 0


@pytest.mark.parametrize("hop", [Hop.HANDOFF, Hop.KEEP, Hop.LOAD])
@pytest.mark.parametrize("number", [2, 9])
async def test_an_earlier_chunk_whose_transfer_fails(model, reference, tmp_path, monkeypatch, hop, number):
    """While a later one waits for it: no token comes of what never arrived, and the next request is as ever."""
    write, seen = Hops.write, [0]

    async def failing(self, transport, batch, intent, way):
        seen[0] += way is hop
        if way is hop and seen[0] == number:
            for _ in range(200):  # until the next chunk is begun, if there is to be one
                if len(cluster.traffic_managers["prefill-0"]._forwards) > 1:
                    break
                await asyncio.sleep(0.005)
            raise DualPathError(ErrorCode.TRANSFER_FAILED, "failed by the test")
        return await write(self, transport, batch, intent, way)

    monkeypatch.setattr(Hops, "write", failing)
    config = cluster_config(model, tmp_path, scheduler__read_side="pe_only", prefill__max_batch_tokens=64)
    async with run_cluster(config) as cluster:
        sampling = Sampling(5, ignore_eos=True)
        outcome = await cluster.driver.submit(cluster.driver.request(random_prompt(12, 600), sampling))
        async with asyncio.timeout(60):
            await outcome.done.wait()
        assert outcome.failed is not None and outcome.failed.code is ErrorCode.TRANSFER_FAILED
        assert outcome.tokens == []
        await cluster.quiet()
        prompt = random_prompt(13, 600)
        assert (await cluster.driver.generate(prompt, 5)).tokens == reference.greedy(prompt, 5)
        assert cluster.prefill().forwards.pool.used == 0
