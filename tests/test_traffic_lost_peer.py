"""The other side's traffic manager is lost: nothing waits for it until a deadline, and nothing more goes there."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DualPathError, ErrorCode
from common.faults import Fault
from common.messages import Ready
from services.traffic_manager.staging import Staged
from tests.cluster import cluster_config, random_prompt, run_cluster
from tests.test_traffic_timings import REGION as PEER_BUFFER
from tests.test_traffic_timings import Bench, peer_staged, stage, the


async def refused(staged: Staged) -> None:
    with pytest.raises(DualPathError) as caught:
        async with staged.use():
            pass
    assert caught.value.code is ErrorCode.ENGINE_LOST


async def test_nothing_more_is_moved_between_us_and_a_lost_peer(monkeypatch):
    bench = Bench(monkeypatch)
    requests = bench.prefill()
    requests.stage(stage(2, 0, 0))
    await bench.go()
    requests.peer_staged(peer_staged(0, 0, 0.0, 0.0))
    assert the(Ready, bench.told)
    staged = requests.live["r", 0]
    assert requests.peer_left("another") == set()
    async with staged.use():
        pass
    assert requests.peer_left("peer-1") == {PEER_BUFFER}
    await refused(staged)


@pytest.mark.parametrize("late", ["PeerStaged", "Stage"])
async def test_messages_that_come_after_it_has_left_change_nothing(monkeypatch, late):
    bench = Bench(monkeypatch)
    requests = bench.prefill()
    if late == "Stage":
        requests.peer_staged(peer_staged(0, 0, 0.0, 0.0))
        requests.peer_left("peer-1")
        requests.stage(stage(2, 0, 0))
        await bench.go()
    else:
        requests.stage(stage(2, 0, 0))
        await bench.go()
        requests.peer_left("peer-1")
        requests.peer_staged(peer_staged(0, 0, 0.0, 0.0))
    await refused(requests.live["r", 0])


@pytest.mark.parametrize(("victim", "survivor", "intent"), [
    ("prefill-0", "decode-0", "kv_load"),  # a push into its device memory
    ("decode-0", "prefill-0", "pd_handoff"),  # a layer on its way into its buffer
])  # fmt: skip
async def test_what_is_on_its_way_to_a_lost_peer_frees_its_slots_at_once(model, tmp_path, victim, survivor, intent):
    hang = Fault(point="transfer", action="delay", process=f"{survivor}.tm", type=intent, seconds=90.0, times=0)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="de_only", timeouts__transfer_s=100.0, faults=[hang]
    )
    prompt = random_prompt(1, 300)
    clean = config.model_copy(update={"faults": []})
    async with run_cluster(clean) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
    async with run_cluster(config) as cluster:
        reading = asyncio.create_task(cluster.driver.generate(prompt, 8))
        manager = cluster.traffic_managers[survivor]
        async with asyncio.timeout(20):
            while not manager._compute._transfers:
                await asyncio.sleep(0.01)
        engine, lost = cluster.engines.pop(victim), cluster.traffic_managers.pop(victim)
        for service in (engine, lost):
            await service.stop(drain=False)
        with pytest.raises(DualPathError):
            await reading
        await cluster.quiet()
        manager.check_integrity()
