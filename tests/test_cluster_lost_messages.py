"""Messages that are lost or late: what waited for them ends in time, gives everything back, and harms nobody else."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import RETRYABLE, DualPathError, ErrorCode
from common.faults import Fault
from common.transport.base import Batch, Intent, TransferError, make_runs
from common.types import Sampling
from services.traffic_manager.push import PushWindow
from tests.cluster import cluster_config, random_prompt, run_cluster


def lost(name, action="drop", seconds=0.0, after=0, process=None):
    return Fault(point="message", action=action, type=name, seconds=seconds, after=after, process=process)


SHORT = {f"timeouts__{name}": 0.4 for name in ("transfer_s", "call_s", "stage_s", "read_s")}


@pytest.mark.parametrize(
    ("name", "sender", "after"),
    [
        ("Assign", "scheduler", 0),
        ("Assign", "scheduler", 1),
        ("PeerStaged", "decode-0.tm", 0),
        ("Ready", "prefill-0.tm", 0),
        ("FirstToken", "prefill-0", 0),
        ("Delivered", "prefill-0.tm", 0),
    ],
)
async def test_a_lost_message_ends_its_request_in_time(model, reference, tmp_path, name, sender, after):
    """A11: whoever waits for it gives up, the attempt may be repeated, and nothing stays reserved."""
    prompt = random_prompt(1, 150)
    fault = lost(name, process=sender, after=after)
    config = cluster_config(model, tmp_path, faults=[fault], timeouts__request_s=3, **SHORT)
    async with run_cluster(config) as cluster:
        async with asyncio.timeout(8):
            with pytest.raises(DualPathError) as failure:
                await cluster.driver.generate(prompt, 4)
        assert failure.value.code in RETRYABLE
        await cluster.quiet()
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


def received(cluster):
    """What the client has got of each request, in order."""
    return [outcome.tokens for outcome in cluster.driver.outcomes.values()]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_lost_push_costs_its_request_only(model, reference, tmp_path, transport, monkeypatch):
    """DE path: a push that is never answered leaves device memory in doubt: the right to write there is withdrawn."""
    prompt = random_prompt(2, 200)
    granted = []
    build = PushWindow.__init__

    def recorded(self, *args):
        build(self, *args)
        granted.append(self.region)

    monkeypatch.setattr(PushWindow, "__init__", recorded)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="de_only", network__transport=transport, timeouts__transfer_s=0.6,
        faults=[lost("PushRows", after=1)],
    )  # fmt: skip
    async with run_cluster(config) as cluster:
        de = cluster.traffic_managers["decode-0"]
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.generate(prompt, 4)
        assert failure.value.code is ErrorCode.TRANSFER_FAILED
        assert received(cluster)[-1] == []  # none of what was computed without those rows
        (window,) = granted
        with pytest.raises(TransferError):
            await de._compute.write(Batch(de._buffer, window, make_runs(0, 0, 64)), Intent.KV_LOAD)
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


async def test_pages_in_doubt_are_not_given_away(model, reference, tmp_path):
    """The copy into pages is not confirmed in time: they are nobody's until it is, and the buffer comes back."""
    prompt = random_prompt(4, 150)
    late = lost("LoadPages", "delay", seconds=1.5)
    config = cluster_config(model, tmp_path, faults=[late], **SHORT)
    async with run_cluster(config) as cluster:
        pages = cluster.decode().pages
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.generate(prompt, 4)
        assert failure.value.code is ErrorCode.UNREACHABLE
        assert pages.num_free == pages.pool.total - 3
        async with asyncio.timeout(3):
            while pages.num_free < pages.pool.total:
                await asyncio.sleep(0.02)
        await cluster.quiet()
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


async def test_a_lost_load_gives_the_buffer_back(model, reference, tmp_path):
    prompt = random_prompt(4, 150)
    async with run_cluster(cluster_config(model, tmp_path, faults=[lost("LoadPages")], **SHORT)) as cluster:
        with pytest.raises(DualPathError):
            await cluster.driver.generate(prompt, 4)
        async with asyncio.timeout(3):
            while not cluster.traffic_managers["decode-0"].idle:
                await asyncio.sleep(0.02)
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)
        cluster.decode().pages.give_back([0, 1, 2])  # for the harness: that call will never be answered


async def test_a_silent_store_does_not_hold_up_every_handoff(model, reference, tmp_path):
    """B26: announcements are not answered; after the first that is late, storage is left aside for a while."""
    fault = Fault(point="message", action="drop", type="Announce", times=0)
    config = cluster_config(
        model, tmp_path, timeouts__call_s=1.0, timeouts__breaker_s=30, timeouts__lookup_s=0.2, faults=[fault]
    )
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(random_prompt(5, 100), 3)
        for seed in range(6, 9):
            prompt = random_prompt(seed, 100)
            async with asyncio.timeout(0.9):
                outcome = await cluster.driver.generate(prompt, 3)
            assert outcome.tokens == reference.greedy(prompt, 3)


async def test_a_cancellation_right_behind_its_request(model, tmp_path):
    """A10: the client leaves at once; nothing of the request is ever dispatched."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        driver = cluster.driver
        for seed in range(8):
            request = driver.request(random_prompt(seed, 300), Sampling(50, ignore_eos=True))
            submitting = asyncio.create_task(driver.submit(request))
            await asyncio.sleep(0)  # the call is on its way
            driver.cancel(request)
            outcome = await submitting
        await asyncio.sleep(0.5)
        assert not cluster.scheduler._live
        assert not outcome.tokens


async def test_a_lost_end_is_forgotten_in_time(model, tmp_path):
    """The scheduler never hears that a request has finished: it does not count it for ever."""
    config = cluster_config(model, tmp_path, faults=[lost("RequestDone"), lost("HandedOver")], timeouts__request_s=1)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(random_prompt(7, 100), 3)
        assert cluster.scheduler._live
        await cluster.quiet()
        assert not cluster.scheduler._live


async def test_a_lost_all_clear_is_asked_for_again(model, tmp_path):
    """The prefill side writes no more, but the decode side has not heard of it: its slots come back all the same."""
    slow = Fault(point="compute", action="delay", process="prefill-0", seconds=0.3)
    config = cluster_config(model, tmp_path, faults=[lost("PeerReleased"), slow], timeouts__call_s=0.3)
    async with run_cluster(config) as cluster:
        request = cluster.driver.request(random_prompt(8, 200), Sampling(50, ignore_eos=True))
        await cluster.driver.submit(request)
        await asyncio.sleep(0.2)
        assert not cluster.traffic_managers["decode-0"].idle
        cluster.driver.cancel(request)
        await cluster.quiet()


async def test_slots_of_a_request_that_the_prefill_side_was_never_told_of(model, reference, tmp_path):
    """The scheduler has told the decode side only, and is gone: nobody else ever speaks of that attempt again."""
    config = cluster_config(model, tmp_path, faults=[lost("Assign", process="scheduler", after=1)], **SHORT)
    async with run_cluster(config) as cluster:
        manager, prompt = cluster.traffic_managers["decode-0"], random_prompt(3, 150)
        request = cluster.driver.request(prompt, Sampling(4, ignore_eos=True))
        await cluster.driver.submit(request)
        async with asyncio.timeout(10):
            while not any(staged.exposed for staged in manager.requests.live.values()):
                await asyncio.sleep(0.01)
            cluster.decode().scheduler_replaced()
            while not manager.idle:
                await asyncio.sleep(0.01)
        assert not cluster.traffic_managers["prefill-0"].requests._early
        cluster.driver.cancel(request)
        assert (await cluster.driver.generate(prompt, 4)).tokens == reference.greedy(prompt, 4)


async def test_slots_of_a_request_whose_prefill_engine_is_not_reached(model, tmp_path):
    """Its assignment is given up; the engine lives, has never heard of the request, and is not told to drop it."""
    never = Fault(point="message", action="fail", type="Assign", process="scheduler", after=1, times=0)
    async with run_cluster(cluster_config(model, tmp_path, faults=[never], **SHORT)) as cluster:
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.generate(random_prompt(4, 150), 4)
        assert failure.value.code is ErrorCode.UNREACHABLE
        await cluster.quiet()
