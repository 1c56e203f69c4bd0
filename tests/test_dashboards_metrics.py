"""What operators read of members, queues and memory, against what the processes know."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.types import Role
from tests.lifecycle_harness import client_of, live_cluster

OTHERS = [role for role in Role if role is not Role.SCHEDULER]
EACH = {"storage-gateway": 1, "decode": 1, "frontend": 1}


async def test_the_scheduler_counts_its_members(tmp_path: Path) -> None:
    async with live_cluster(tmp_path / "blocks", prefill=2, scheduler__max_waiting=77) as live:

        async def told(**expected: float) -> None:
            """Soon: a process that leaves does not wait for the scheduler."""
            async with asyncio.timeout(20):
                while True:
                    values = live.cluster.scheduler.metrics.snapshot()
                    if {role.value: values[f"members{{role={role.value}}}"] for role in OTHERS} == {**EACH, **expected}:
                        return
                    await asyncio.sleep(0.02)

        await told(**{"prefill": 2, "traffic-manager": 3})
        await live.stop("prefill-1")
        await told(**{"prefill": 1, "traffic-manager": 2})
        await live.start("prefill-1")
        await told(**{"prefill": 2, "traffic-manager": 3})
        assert live.cluster.scheduler.metrics.snapshot()["requests_waiting_limit"] == 77


async def test_memory_and_what_is_in_use_of_it(tmp_path: Path) -> None:
    async with live_cluster(tmp_path / "blocks") as live, client_of(live) as client:
        asking = asyncio.create_task(client.ask([1] * 70, 100, stream=True))
        async with asyncio.timeout(30):
            while not live.cluster.decode().metrics.snapshot()["engine_requests"]:
                await asyncio.sleep(0.01)
        await asking
        assert client.failed == [] and client.done == 1
        await live.cluster.quiet()
        for engine in live.cluster.engines.values():
            values = engine.metrics.snapshot()
            assert values["engine_requests"] == 0
            assert 0 < values["device_memory_peak_bytes"] <= values["device_memory_bytes"] == engine.memory.budget
        values = live.cluster.decode().metrics.snapshot()
        assert values["pages_free"] == values["pages"] == live.cluster.decode().memory.num_pages
        for manager in live.cluster.traffic_managers.values():
            values = manager.metrics.snapshot()
            assert values["buffer_slots_free"] == values["buffer_slots"] > 0
