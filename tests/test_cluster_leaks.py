"""Cancellation and soak: whatever happens to requests, everything is back at the baseline afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from common.errors import ErrorCode
from common.types import Sampling
from tests.cluster import VOCAB, cluster_config, run_cluster


def resources():
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": Counter(task.get_name().rpartition(".")[0] or task.get_name() for task in asyncio.all_tasks()),
        "threads": threading.active_count(),
        "mappings": sum("memfd:dualpath" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def growth(before, after):
    """What is more than it was. Executors fill up to their bound, and sockets linger for a moment."""
    more = {name: after[name] - before[name] for name in before}
    slack = {"fds": 4, "threads": 4}
    return {name: value for name, value in more.items() if (value if name == "tasks" else value > slack.get(name, 0))}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_two_hundred_mixed_requests_half_of_them_cancelled(model, reference, tmp_path, transport):
    rng = random.Random(transport)
    base = [rng.choice(VOCAB) for _ in range(300)]
    config = cluster_config(
        model, tmp_path, scheduler__read_side="round_robin", network__transport=transport, prefill__max_batch_tokens=192
    )

    async def one(index):
        prompt = base[: rng.choice((0, 63, 64, 200, 300))] + [rng.choice(VOCAB) for _ in range(rng.randint(1, 90))]
        length = rng.choice((1, 2, 5, 30, 70))
        request = driver.request(prompt, Sampling(length, ignore_eos=True))
        outcome = await driver.submit(request)
        if index % 2:
            await asyncio.sleep(rng.random() * 0.3)
            driver.cancel(request)
            return
        async with asyncio.timeout(60):
            await outcome.done.wait()
        assert outcome.failed is None
        if index % 10 == 0:
            assert outcome.tokens == reference.greedy(prompt, length)

    async with run_cluster(config, prefill=1, decode=2) as cluster:
        driver = cluster.driver
        await driver.generate(base, 2)
        for _ in range(4):  # every pair of peers has met once: links and mappings are made on first use
            await asyncio.gather(*(one(0) for _ in range(12)))
        await cluster.quiet()
        before = resources()
        for start in range(0, 200, 25):
            await asyncio.gather(*(one(index) for index in range(start, start + 25)))
        await cluster.quiet()
        cluster.check_integrity()
        async with asyncio.timeout(10):
            while grown := growth(before, resources()):
                print("not yet back:", grown)
                await asyncio.sleep(0.2)
        assert (await driver.generate(base, 8)).tokens == reference.greedy(base, 8)


async def test_nothing_is_left_of_a_cluster(model, tmp_path):
    async def round_trip():
        async with run_cluster(cluster_config(model, tmp_path)) as cluster:
            await cluster.driver.generate([5] * 100, 2)
        await asyncio.sleep(0.3)  # zmq's lingering sockets

    await round_trip()
    before = resources()
    await round_trip()
    after = resources()
    assert after["mappings"] == 0 and after["tasks"] == before["tasks"]
    assert after["fds"] <= before["fds"]


async def test_short_prompts_leave_nothing_staged(model, tmp_path):
    """A07: prompts around one block, many at once."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        prompts = [[7 + length % 50] * length for length in (1, 63, 64, 65)] * 8
        for _ in range(5):
            await asyncio.gather(*(cluster.driver.generate(prompt, 1) for prompt in prompts))
        await cluster.quiet()
        assert all(not manager.requests.live for manager in cluster.traffic_managers.values())


async def test_abandoned_long_prompts_do_not_hold_up_a_short_one(model, tmp_path):
    """A10: cancelled prompts run no further chunk."""
    config = cluster_config(model, tmp_path, prefill__max_batch_tokens=64)
    async with run_cluster(config) as cluster:
        driver = cluster.driver
        rng = random.Random(1)
        prompts = [[rng.choice(VOCAB) for _ in range(1500)] for _ in range(10)]
        requests = [driver.request(prompt, Sampling(1)) for prompt in prompts]
        for request in requests:
            await driver.submit(request)
        await asyncio.sleep(0.2)
        for request in requests:
            driver.cancel(request)
        await asyncio.sleep(0.1)
        forwards = cluster.prefill().forwards.num_begun
        await driver.generate([9] * 32, 1)
        assert cluster.prefill().forwards.num_begun - forwards <= 2


async def test_limits_are_checked_again_at_the_engines(model, tmp_path):
    """A19: what the front end should have refused is refused by the engine, and nothing is staged."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        limit = min(cluster.prefill().max_context_tokens, cluster.decode().max_context_tokens)
        good = await cluster.driver.submit(cluster.driver.request([5] * (limit - 1), Sampling(1, ignore_eos=True)))
        too_long, no_token = [5] * limit, [5, 512]
        for prompt in (too_long, no_token):
            bad = await cluster.driver.submit(cluster.driver.request(prompt, Sampling(1, ignore_eos=True)))
            async with asyncio.timeout(60):
                await bad.done.wait()
            assert bad.failed is not None and bad.failed.code is ErrorCode.BAD_REQUEST
        async with asyncio.timeout(60):
            await good.done.wait()
        assert good.failed is None


async def test_engines_with_an_abandoned_forward_drain_at_once(model, tmp_path):
    """C18: the forward in hand ends, then the engine, then its traffic manager; nobody waits for a deadline."""
    config = cluster_config(model, tmp_path, timeouts__drain_s=20)
    async with run_cluster(config) as cluster:
        requests = [cluster.driver.request([5 + n] * 1500, Sampling(1)) for n in range(4)]
        for request in requests:
            await cluster.driver.submit(request)
        async with asyncio.timeout(10):
            while not cluster.prefill().forwards.in_hand:
                await asyncio.sleep(0.001)
        for request in requests:
            cluster.driver.cancel(request)
        async with asyncio.timeout(5):
            for engines in (cluster.engines, cluster.traffic_managers):
                for name in ("prefill-0", "decode-0"):
                    await engines.pop(name).stop()
