"""Processes that come, go and come back while clients are served: nobody's request is lost."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from common.faults import Fault
from common.types import Request
from services.scheduler.service import ENGINES, Scheduler
from tests.cluster import Cluster, cluster_config
from tests.lifecycle_harness import Live, client_of, live_cluster, under_load

PAIRS = [f"{kind}-{index}" for kind in ("prefill", "decode", "gateway", "frontend") for index in range(2)]
#: Leases short enough for a test, long enough for a loaded machine.
SHORT = {"timeouts__heartbeat_s": 0.2, "timeouts__heartbeat_timeout_s": 3.0}


async def test_a_rolling_restart_of_every_process_loses_no_request(tmp_path: Path) -> None:
    """C16, C18, A16: 0 failed of 500 requests, every token right, and nothing in hand at the end."""
    async with live_cluster(tmp_path, prefill=2, decode=2, frontends=2, gateways=2) as live:

        async def one_after_the_other() -> None:
            for name in ["scheduler", *PAIRS]:
                await live.restart(name)

        client = await under_load(live, one_after_the_other, 500)
        assert client.failed == [] and client.done == client.sent >= 500


async def test_engines_join_and_leave_a_live_cluster(tmp_path: Path) -> None:
    """From 1 prefill and 1 decode engine to 2 and 3 and back to others than at first: 0 failed of 500 requests."""
    async with live_cluster(tmp_path) as live:

        async def scale() -> None:
            for name in ("prefill-1", "decode-1", "decode-2", "gateway-1", "frontend-1"):
                await live.start(name)
            await asyncio.sleep(0.5)
            used = dict(live.cluster.engines)
            for name in ("prefill-0", "decode-0", "decode-1", "gateway-0", "frontend-0"):
                await live.stop(name)
            for name in ("prefill-1", "decode-1", "decode-2"):
                [count] = [
                    value
                    for metric, value in used[name].metrics.snapshot().items()
                    if metric in ("prefill_tokens_total", "decode_tokens_total")
                ]
                assert count > 0, f"{name} got no work"

        client = await under_load(live, scale, 500)
        assert client.failed == [] and client.done == client.sent >= 500
        assert sorted(live.cluster.engines) == ["decode-2", "prefill-1"]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "gateway-0", "scheduler"])
async def test_requests_wait_for_the_only_process_of_a_role(tmp_path: Path, name: str) -> None:
    async with live_cluster(tmp_path) as live:
        client = await under_load(live, lambda: live.restart(name), 40, workers=4, after_s=0.3)
        assert client.failed == [] and client.done == client.sent


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_the_only_engine_leaves_while_storage_is_asked_for_its_request(tmp_path: Path, name: str) -> None:
    async with live_cluster(tmp_path) as live:
        scheduler, restarting = live.cluster.scheduler, None
        look_up = scheduler._lookup.hit_blocks

        async def slow(request: Request) -> int:
            nonlocal restarting
            if restarting is None:
                restarting = asyncio.create_task(live.restart(name))
                while scheduler._presence._missing(ENGINES) == []:
                    await asyncio.sleep(0.01)
            return await look_up(request)

        scheduler._lookup.hit_blocks = slow  # type: ignore[method-assign]
        async with client_of(live) as client:
            await client.ask([1] * 100, 5, stream=False)
        assert restarting is not None
        await restarting
        assert client.failed == [] and client.done == 1 and not live.retries()


@pytest.mark.parametrize("name", ["scheduler", "prefill-0", "decode-0", "gateway-0"])
async def test_a_process_that_dies_without_a_word_is_replaced(tmp_path: Path, name: str) -> None:
    """A16: the same name again within a heartbeat interval. What it had is done again from what clients have."""
    async with live_cluster(tmp_path, prefill=2, decode=2, gateways=2, **SHORT) as live:

        async def swap() -> None:
            await live.kill(name)
            await live.start(name)

        client = await under_load(live, swap, 40, workers=8, after_s=0.3)
        assert client.failed == [] and client.done == client.sent


async def test_a_draining_engine_finishes_its_streams_and_gets_no_new_ones(tmp_path: Path) -> None:
    """C16, first part: streams of a decode engine that is told to end are not interrupted."""
    async with live_cluster(tmp_path, decode=2, timeouts__drain_s=60.0, perf__time_factor=0.5) as live:
        engine = live.cluster.decode(0)
        async with client_of(live) as client, asyncio.TaskGroup() as group:
            for seed in range(8):
                group.create_task(client.ask([seed] * 70, 60, stream=True))
            async with asyncio.timeout(30):
                while len(engine._running) < 2:
                    await asyncio.sleep(0.01)
            group.create_task(live.stop("decode-0"))
            while engine.incarnation not in live.cluster.scheduler.leaving:
                await asyncio.sleep(0.01)
            started = live.cluster.scheduler._started[engine.incarnation]
            for seed in range(4):
                await client.ask([seed] * 90, 2, stream=False)
            assert live.cluster.scheduler._started.get(engine.incarnation, started) == started
        assert client.failed == [] and client.done == 12 and not live.retries()


async def test_what_does_not_end_within_the_drain_moves(tmp_path: Path) -> None:
    """C16: long streams on a decode engine that may drain for 0.3 s only. Each goes on elsewhere, exactly."""
    async with live_cluster(tmp_path, decode=2, timeouts__drain_s=0.3, perf__time_factor=1.0) as live:
        engine = live.cluster.decode(0)
        async with client_of(live) as client, asyncio.TaskGroup() as group:
            for seed in range(6):
                group.create_task(client.ask([seed] * 70, 120, stream=True))
            async with asyncio.timeout(30):
                while len(engine._running) < 2:
                    await asyncio.sleep(0.01)
            await live.stop("decode-0")
        assert client.failed == [] and client.done == 6
        assert live.retries().get("retries_total{code=moved}", 0) >= 2


async def test_kv_waits_longer_than_a_lease_lasts(tmp_path: Path) -> None:
    """A18: the second request's KV waits in the staging buffer, several leases long, for the first one to end. Leases
    are renewed by heartbeats, whoever waits for what: nothing is given up, or read after it was freed."""
    short = {"timeouts__heartbeat_s": 0.1, "timeouts__heartbeat_timeout_s": 1.5}
    async with live_cluster(tmp_path, decode__max_running=1, perf__time_factor=8.0, **short) as live:
        members = {member.incarnation for member in live.cluster.scheduler.registry.all()}
        async with client_of(live) as client, asyncio.TaskGroup() as group:
            group.create_task(client.ask([1] * 100, 120, stream=True))
            group.create_task(client.ask([2] * 300, 20, stream=True))
            waited = 0.0
            while waited < 3.0:
                await asyncio.sleep(0.1)
                handed_over = sum(bool(each.pages) for each in live.cluster.decode()._sequences.values())
                waited += 0.1 * (len(live.cluster.decode()._sequences) == 2 and handed_over == 1)
                assert client.done < 2, "nobody waited"
        assert client.failed == [] and client.done == 2 and not live.retries()
        assert {member.incarnation for member in live.cluster.scheduler.registry.all()} == members


async def test_members_that_do_not_come_back_to_a_new_scheduler_are_given_up(tmp_path: Path) -> None:
    """An engine that goes while there is no scheduler is nobody's to announce: each member finds out by itself."""
    async with live_cluster(tmp_path, decode=2, **SHORT) as live:
        await live.kill("scheduler")
        await live.kill("decode-1")
        gone = next(member for member in live.frontends["frontend-0"].members.values() if member.name == "decode-1")
        await live.start("scheduler")
        async with asyncio.timeout(20):
            for service in (live.frontends["frontend-0"], live.cluster.prefill(), live.cluster.decode(0)):
                while gone.incarnation in service.members:
                    await asyncio.sleep(0.05)
        assert {member.name for member in live.frontends["frontend-0"].members.values()} == {
            "prefill-0", "prefill-0.tm", "decode-0", "decode-0.tm", "gateway-0",
        }  # fmt: skip
        async with client_of(live) as client:
            await client.ask([1] * 100, 5, stream=False)
        assert client.failed == []


async def test_a_member_does_not_outlive_its_lease_while_the_scheduler_may_live(tmp_path: Path) -> None:
    """It answers nobody, but its address does not refuse: it may be giving us up right now."""
    async with live_cluster(tmp_path, **{**SHORT, "timeouts__heartbeat_timeout_s": 1.0}) as live:
        address = live.cluster.scheduler.node.endpoint.removeprefix("tcp://").partition(":")
        engine = live.cluster.decode(0)
        await live.kill("scheduler")
        with socket.create_server((address[0], int(address[2]))):  # takes connections, says nothing
            async with asyncio.timeout(10):
                await engine.failed.wait()
        assert "no lease" in str(engine.failure)
        for service in live.services:
            service.failure = None  # as it should


async def test_a_lost_heartbeat_is_sent_again_within_the_lease(tmp_path: Path) -> None:
    fault = Fault(point="message", action="drop", type="Heartbeat", process="decode-0", after=2, times=1)
    async with live_cluster(tmp_path, faults=[fault], **SHORT) as live:
        engine = live.cluster.decode(0)
        await asyncio.sleep(4.0)
        assert engine.failure is None and live.cluster.scheduler.registry.get(engine.incarnation) is not None
        assert engine.faults._seen[0] > 4, "heartbeats went on"


async def test_the_order_in_which_processes_start_does_not_matter(tmp_path: Path) -> None:
    """Front end first, scheduler last: each waits for whom it needs, and says so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        control = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = cluster_config("ds-27b", tmp_path, scheduler__control=control, perf__time_factor=0.1)
    live = Live(Cluster(config, Scheduler(config, "never started")))
    await live.cluster.scheduler.stop(drain=False)
    starting = []
    try:
        for name in ("frontend-0", "decode-0", "gateway-0", "prefill-0", "scheduler"):
            starting.append(asyncio.create_task(live.start(name)))
            await asyncio.sleep(0.2)
        await asyncio.gather(*starting)
        async with client_of(live) as client:
            await client.ask([1] * 100, 5, stream=False)
        assert client.failed == []
        await live.cluster.quiet()
    finally:
        for task in starting:
            task.cancel()
        for service in live.services:
            await service.stop(drain=False)


async def test_several_gateways_share_the_blocks(tmp_path: Path) -> None:
    """What is stored through one is hit through any, also when the one that stored it has gone; both are used."""
    async with live_cluster(tmp_path, prefill=2, decode=2, gateways=2) as live:
        async with client_of(live) as client:
            for seed in range(8):
                await client.ask([seed] * 640, 1, stream=False)
        await live.cluster.quiet()
        written = [gateway.metrics.snapshot()["block_store_written_bytes_total"] for gateway in live.gateways.values()]
        assert sum(written) == 8 * 10 * 16_384
        await live.stop("gateway-0")
        before = live.cluster.counter("storage_read_bytes_total")
        async with client_of(live) as client:
            for seed in range(8):
                await client.ask([seed] * 640, 1, stream=False)
        assert client.failed == []
        assert live.cluster.counter("storage_read_bytes_total") - before == 8 * 9 * 16_384


async def test_a_gateway_that_does_not_answer_costs_no_hits_of_the_other(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, gateways=2, timeouts__lookup_s=0.5) as live:
        async with client_of(live) as client:
            await client.ask([7] * 640, 1, stream=False)
        await live.cluster.quiet()
        used = live.cluster.traffic_managers["prefill-0"]._gateway()
        assert used is not None
        other = next(gateway for name, gateway in live.gateways.items() if name != used.name)
        other._lookup.longest_prefix = lambda keys: asyncio.sleep(60, 0)  # type: ignore[method-assign,assignment,return-value]
        before = live.cluster.counter("storage_read_bytes_total")
        async with client_of(live) as client:
            await client.ask([7] * 640, 1, stream=False)
        assert live.cluster.counter("storage_read_bytes_total") - before == 9 * 16_384


async def test_streams_go_on_while_there_is_no_scheduler(tmp_path: Path) -> None:
    """What is assigned needs it no more. A request that comes meanwhile waits for the next one."""
    async with live_cluster(tmp_path, perf__time_factor=1.0, **SHORT) as live, client_of(live) as client:
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(client.ask([seed] * 70, 100, stream=True)) for seed in range(3)]
            async with asyncio.timeout(30):
                while len(live.cluster.decode()._running) < 3:
                    await asyncio.sleep(0.01)
            await live.kill("scheduler")
            async with asyncio.timeout(30):
                while live.frontends["frontend-0"]._enrolment.alone_since is None:
                    await asyncio.sleep(0.02)
            late = group.create_task(client.ask([9] * 70, 3, stream=False))
            await asyncio.wait(streams)
            assert client.done == 3 and not late.done() and not live.retries()
            await live.start("scheduler")
        assert client.failed == [] and client.done == 4 and not live.retries()
