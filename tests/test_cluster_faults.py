"""Faults at every seam: tokens stay right, the failure reaches whoever waits, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DualPathError, ErrorCode
from common.faults import Fault
from tests.cluster import cluster_config, random_prompt, run_cluster


def corrupt_one_byte(blocks_dir):
    """Flip one byte of every stored block, in the exponent of a float32: wrong KV, not noise."""
    files = [path for path in (blocks_dir / "blocks").rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[-997] ^= 0x40
        path.write_bytes(data)


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_corrupt_block_is_a_miss(model, reference, tmp_path, read_side):
    """One byte of a stored block flips: the checksum sees it, the block is recomputed, tokens are right."""
    prompt = random_prompt(1, 300)
    expected = reference.greedy(prompt, 8)
    # staging for all blocks at once: those behind a miss that would have to wait are not read, nor found to be corrupt
    config = cluster_config(model, tmp_path, scheduler__read_side=read_side, storage__staging="4MiB")
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        corrupt_one_byte(tmp_path)
        outcome = await cluster.driver.generate(prompt, 8)
        assert outcome.cached_tokens == 0 and outcome.tokens == expected
        await cluster.quiet()
        assert (await cluster.driver.generate(prompt, 8)).cached_tokens == 256  # stored again


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_corrupt_block_changes_tokens_when_nobody_verifies(model, reference, tmp_path, read_side):
    """The oracle sees wrong KV: with checksums off, the same flip gives other tokens."""
    prompt = random_prompt(1, 300)
    config = cluster_config(model, tmp_path, scheduler__read_side=read_side, storage__verify=False)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        corrupt_one_byte(tmp_path)
        outcome = await cluster.driver.generate(prompt, 24)
        assert outcome.cached_tokens == 256
        assert outcome.tokens != reference.greedy(prompt, 24)


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
@pytest.mark.parametrize("intent", ["kv_load", "pd_handoff"])
async def test_a_failed_transfer_costs_its_request_only(model, reference, tmp_path, read_side, intent):
    prompts = [random_prompt(seed, 150) for seed in range(6)]
    fault = Fault(point="transfer", action="fail", type=intent, after=25, times=1)
    async with run_cluster(cluster_config(model, tmp_path, scheduler__read_side=read_side, faults=[fault])) as cluster:
        for prompt in prompts:
            results = await asyncio.gather(cluster.driver.generate(prompt, 2), return_exceptions=True)
            failed = [result for result in results if isinstance(result, DualPathError)]
            assert all(error.code is ErrorCode.TRANSFER_FAILED for error in failed)
        await cluster.quiet()
        for prompt in prompts:  # storage holds nothing wrong afterwards
            for _ in range(2):
                try:
                    outcome = await cluster.driver.generate(prompt, 8)
                except DualPathError as error:
                    assert error.code is ErrorCode.TRANSFER_FAILED
                    continue
                assert outcome.tokens == reference.greedy(prompt, 8)


@pytest.mark.parametrize("action", ["delay", "duplicate"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_delayed_and_duplicated_transfers_change_nothing(model, reference, tmp_path, action, transport):
    fault = Fault(point="transfer", action=action, seconds=0.002, times=0)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="round_robin", network__transport=transport, faults=[fault]
    )
    prompt = random_prompt(2, 260)
    async with run_cluster(config) as cluster:
        for _ in range(3):
            assert (await cluster.driver.generate(prompt, 6)).tokens == reference.greedy(prompt, 6)


MESSAGES = [
    "Assign", "Stage", "PeerStaged", "Ready", "BeginForward", "LayersLoaded", "LayersComputed", "PushRows",
    "ForwardDrained", "FirstToken", "Delivered", "LoadPages", "PersistPages", "PagesPersisted", "Release",
    "PeerReleased", "HandedOver", "PrefillDone", "ReadBlocks", "Announce", "Reserve", "Commit", "Match",
]  # fmt: skip


async def test_every_message_twice(model, reference, tmp_path):
    """Repeated messages of every kind are recognised; the first one counts."""
    faults = [Fault(point="message", action="duplicate", type=name, times=0) for name in MESSAGES]
    config = cluster_config(model, tmp_path, scheduler__read_side="round_robin", faults=faults)
    base = random_prompt(3, 200)
    async with run_cluster(config, decode=2) as cluster:
        for extra in range(4):
            prompt = base + random_prompt(extra, 30)
            assert (await cluster.driver.generate(prompt, 70)).tokens == reference.greedy(prompt, 70)


@pytest.mark.parametrize("seam", ["storage.read", "message"])
@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_slow_storage_is_left_aside(model, reference, tmp_path, read_side, seam):
    """B26: a read, or only its answer, comes late: recompute. Late bytes land in memory that nobody uses."""
    kind = "BlockResults" if seam == "message" else None
    fault = Fault(point=seam, action="delay", process="gateway-0", type=kind, seconds=4.0, times=1)
    config = cluster_config(
        model, tmp_path, scheduler__read_side=read_side, timeouts__read_s=1.0, timeouts__breaker_s=0.2, faults=[fault]
    )
    prompt = random_prompt(4, 300)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        late = await cluster.driver.generate(prompt, 8)
        assert late.tokens == reference.greedy(prompt, 8)
        await cluster.quiet()  # the slots that were set aside come back
        async with asyncio.timeout(20):
            while (outcome := await cluster.driver.generate(prompt, 8)).cached_tokens != 256:
                assert outcome.tokens == reference.greedy(prompt, 8)
                await asyncio.sleep(0.2)
        assert outcome.tokens == reference.greedy(prompt, 8)


async def test_late_lookup_opens_the_breaker(model, reference, tmp_path):
    fault = Fault(point="storage.match", action="delay", seconds=1.0, times=1)
    config = cluster_config(model, tmp_path, timeouts__lookup_s=0.2, timeouts__breaker_s=0.3, faults=[fault])
    prompt = random_prompt(5, 200)
    async with run_cluster(config) as cluster:
        for _ in range(2):
            outcome = await cluster.driver.generate(prompt, 4)
            assert outcome.tokens == reference.greedy(prompt, 4) and outcome.cached_tokens == 0
        await asyncio.sleep(0.4)
        assert (await cluster.driver.generate(prompt, 4)).cached_tokens == 192


async def test_no_storage_at_all(model, reference, tmp_path):
    """The gateway goes away in mid-run and comes back: requests finish, hits return."""
    prompt = random_prompt(6, 200)
    config = cluster_config(model, tmp_path, timeouts__lookup_s=0.3, timeouts__breaker_s=0.2)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 2)
        await cluster.quiet()
        await cluster.gateway.stop()
        outcome = await cluster.driver.generate(prompt, 4)
        assert outcome.tokens == reference.greedy(prompt, 4) and outcome.cached_tokens == 0
        cluster.gateway = type(cluster.gateway)(cluster.config, "gateway-0")
        await cluster.gateway.start()
        await asyncio.sleep(0.3)
        assert (await cluster.driver.generate(prompt, 4)).cached_tokens == 192


async def test_prefill_failure_reaches_the_client(model, reference, tmp_path):
    """A12, A13: one of many requests fails in the prefill engine; it ends within 2 s, the others are right."""
    fault = Fault(point="compute", action="fail", process="prefill-0", request="r7")
    prompts = [random_prompt(seed, 90) for seed in range(20)]
    async with run_cluster(cluster_config(model, tmp_path, faults=[fault])) as cluster:
        outcomes = await asyncio.gather(
            *(cluster.driver.generate(prompt, 4) for prompt in prompts), return_exceptions=True
        )
        for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
            if index == 7:
                assert isinstance(outcome, DualPathError) and outcome.code is ErrorCode.INTERNAL
            else:
                assert outcome.tokens == reference.greedy(prompt, 4)


async def test_exhausted_device_memory_preempts_and_resumes(model, reference, tmp_path):
    """A29: four growing requests in pages for three; the preempted ones continue exactly in a new attempt."""
    page = 64 * 4 * 2 * 2 * 16 * 4
    config = cluster_config(model, tmp_path, decode__device_memory=9 * page)
    prompts = [random_prompt(seed, 120) for seed in range(4)]
    async with run_cluster(config) as cluster:
        results = await asyncio.gather(*(_with_continuation(cluster, prompt, 150) for prompt in prompts))
        for prompt, tokens in zip(prompts, results, strict=True):
            assert tokens == reference.greedy(prompt, 150)
        assert cluster.decode().metrics.snapshot()["preemptions_total"] > 0


async def _with_continuation(cluster, prompt, max_tokens):
    """What the front end does: go on in a new attempt after a preemption."""
    from common.types import Sampling

    driver = cluster.driver
    tokens: list[int] = []
    request = driver.request(prompt, Sampling(max_tokens, ignore_eos=True))
    for attempt in range(1, 30):
        outcome = await driver.submit(request)
        async with asyncio.timeout(60):
            await outcome.done.wait()
        tokens += outcome.tokens
        if outcome.failed is None:
            return tokens
        assert outcome.failed.code is ErrorCode.PREEMPTED
        request = driver.request(
            prompt + tokens, request.sampling, generated=len(tokens), id=request.request_id, attempt=attempt
        )
    raise AssertionError("never finished")


@pytest.mark.parametrize("victim", ["decode-1", "prefill-1"])
async def test_a_silent_engine_fails_its_requests_and_the_others_go_on(model, reference, tmp_path, victim):
    """An engine that stops answering is given up after heartbeat_timeout_s; others finish with the right tokens."""
    config = cluster_config(
        model, tmp_path, timeouts__heartbeat_s=0.2, timeouts__heartbeat_timeout_s=2.0, prefill__max_batch_tokens=64,
        faults=[Fault(point="compute", action="delay", seconds=0.05, times=0)],
    )  # fmt: skip
    prompts = [random_prompt(seed, 130) for seed in range(12)]
    expected = [reference.greedy(prompt, 8) for prompt in prompts]  # beforehand: nobody may be silent for that long
    async with run_cluster(config, prefill=2, decode=2) as cluster:
        waiting = [asyncio.create_task(cluster.driver.generate(prompt, 8)) for prompt in prompts]
        await asyncio.sleep(0.4)
        engine, manager = cluster.engines.pop(victim), cluster.traffic_managers.pop(victim)
        for service in (engine, manager):
            service._registered = False  # it dies without a word
            await service.stop(drain=False)
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, DualPathError)]
        assert lost and all(error.code in (ErrorCode.ENGINE_LOST, ErrorCode.TRANSFER_FAILED) for error in lost)
        for tokens, outcome in zip(expected, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                assert outcome.tokens == tokens
        assert (await cluster.driver.generate(prompts[0], 8)).tokens == expected[0]
