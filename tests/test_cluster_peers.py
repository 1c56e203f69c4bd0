"""Peers that are wrong, refuse or go away: nobody else suffers, and nothing is kept for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.blocks.pool import SlotPool
from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Fault
from common.messages import Cancel, GetStatus, Submit
from common.types import Sampling
from services.storage_gateway.service import StorageGateway
from services.traffic_manager.staging import SlotQueue
from tests.cluster import cluster_config, random_prompt, run_cluster


async def test_a_call_of_a_one_way_message_is_refused(model, reference, tmp_path):
    """F07: it has no answer; the process that got it goes on reading."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.scheduler.call(Cancel("nobody", 0), 1.0)
        assert failure.value.code is ErrorCode.MALFORMED
        await cluster.driver.scheduler.call(GetStatus(), 1.0)


@pytest.mark.parametrize("wrong", ["prompt", "keys", "empty"])
async def test_a_malformed_request_is_refused_before_it_is_dispatched(model, reference, tmp_path, wrong):
    """A13: half a token, or keys that do not fit the prompt, cost nobody else anything."""
    prompt = random_prompt(1, 100)
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        request = cluster.driver.request(prompt, Sampling(4, ignore_eos=True))
        changed = {
            "prompt": replace(request, prompt=request.prompt + b"x"),
            "keys": replace(request, keys=request.keys[:-1]),
            "empty": replace(request, prompt=b"", keys=b""),
        }
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.scheduler.call(Submit(changed[wrong]), 2.0)
        assert failure.value.code is ErrorCode.BAD_REQUEST
        assert not cluster.scheduler._live
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


async def test_a_refusal_on_one_side_frees_the_other(model, tmp_path):
    """A08, A19: the prefill engine refuses what the decode engine has staged already."""
    config = cluster_config(model, tmp_path, prefill__device_memory="256KiB")
    async with run_cluster(config) as cluster:
        limit = cluster.prefill().max_context_tokens
        assert limit + 64 < cluster.decode().max_context_tokens
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.generate([5] * (limit + 1), 4)
        assert failure.value.code is ErrorCode.BAD_REQUEST
        await cluster.quiet()


async def test_no_link_is_kept_to_a_peer_that_has_gone(model, reference, tmp_path):
    """Late messages to it do not open a new one."""
    slow = Fault(point="compute", action="delay", process="prefill-0", seconds=0.15, times=0)
    async with run_cluster(cluster_config(model, tmp_path, faults=[slow]), decode=2) as cluster:
        prompts = [random_prompt(seed, 100) for seed in range(6)]
        waiting = [asyncio.create_task(cluster.driver.generate(prompt, 30)) for prompt in prompts]
        await asyncio.sleep(0.3)
        engine, manager = cluster.engines.pop("decode-1"), cluster.traffic_managers.pop("decode-1")
        gone = {engine.node.endpoint, manager.node.endpoint}
        for service in (manager, engine):  # as a crash of both is noticed
            await service.stop(drain=False)
        await asyncio.gather(*waiting, return_exceptions=True)
        await cluster.quiet()
        for service in cluster.services:
            assert not gone & set(service.node._links), service.name


async def test_a_replaced_gateway_may_still_write(model, reference, tmp_path):
    """A16: its answer will not come, its bytes may: until it is gone for good, nobody else gets that memory."""
    prompt, other = random_prompt(1, 300), random_prompt(2, 300)
    late = Fault(point="transfer", action="delay", process="gateway-0", type="kv_load", seconds=1.2)
    slow = Fault(point="compute", action="delay", process="prefill-0", request="r3", seconds=1.5)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="de_only", timeouts__transfer_s=2.2, timeouts__read_s=2.2,
        faults=[late, slow],
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        for tokens in (prompt, other):
            await cluster.driver.generate(tokens, 1)
        await cluster.quiet()
        cluster.traffic_managers["decode-0"]._fence._host = "another"  # not this process, which never goes
        reading = asyncio.create_task(cluster.driver.generate(prompt, 8))
        await asyncio.sleep(0.3)
        old = cluster.gateway
        config = cluster.config.model_copy(update={"faults": []})
        cluster.gateway = StorageGateway(config, "gateway-0")
        await cluster.gateway.start()
        try:
            assert (await reading).tokens == reference.greedy(prompt, 8)
            assert (await cluster.driver.generate(other, 8)).tokens == reference.greedy(other, 8)
        finally:
            await old.stop(drain=False)


async def test_slots_granted_to_a_cancelled_taker_come_back():
    """The grant and the cancellation fall into the same turn of the loop."""
    queue = SlotQueue(SlotPool(2))
    held = await queue.take(2, 1.0)
    taking = asyncio.create_task(queue.take(2, 1.0))
    await asyncio.sleep(0)
    queue.give_back(held)
    taking.cancel()
    await asyncio.wait({taking})
    assert queue.pool.num_free == 2


async def test_nothing_is_had_at_once():
    """A request without slots of its own (DE path, prefill side) does not queue behind those that want some."""
    queue = SlotQueue(SlotPool(1))
    held = await queue.take(1, 1.0)
    waiting = asyncio.create_task(queue.take(1, 1.0))
    await asyncio.sleep(0)
    assert await queue.take(0, 0.05) == []
    queue.give_back(held)
    assert await waiting == held


def test_a_batch_must_hold_a_block(tmp_path):
    """A prompt is cut at block borders: with less than a block to a batch it would never advance."""
    with pytest.raises(ConfigError, match=r"prefill\.max_batch_tokens"):
        cluster_config(tmp_path, tmp_path, prefill__max_batch_tokens=63)
