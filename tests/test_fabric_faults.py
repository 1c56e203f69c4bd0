"""Cables and rates that fail in mid-transfer, on a fabric with the real system: tokens stay right, and every pool
returns to where it was."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.children import Child, child_command, child_input, read_address
from common.cluster import Process, Processes, with_control
from common.config import Config
from common.rundir import RunDirectory
from common.types import Role
from compose.fabric import Fabric
from services.engine.torch_backend.reference import Reference
from services.launcher.status import get_status
from tests.cluster import cluster_config
from tests.fabric_support import need_fabric
from tests.models import tiny_model

pytestmark = pytest.mark.fabric

#: So slow that the KV of a prompt of 650 tokens (1 KiB each) is on its way for seconds.
SLOW = 200_000
FAST = 20_000_000
DECODES = {"d0": "decode-0", "d1": "decode-1"}
POOLS = ("buffer_slots_free", "pages_free", "storage_staging_slots_free")


@dataclass
class System:
    """A running cluster: a prefill node, and two decode nodes."""

    fabric: Fabric
    configured: Callable[[str], Config]
    cluster: Processes
    http: httpx.AsyncClient
    reference: Reference

    async def counters(self) -> dict[str, dict[str, float]]:
        """Of every member, by name."""
        status = await get_status(self.configured("ctl"))
        return {entry.member.name: dict(entry.counters) for entry in status.members}

    async def restart(self, name: str, node: str) -> Child:
        """A decode engine on a node, as whatever supervises it would start it again; the caller kills it."""
        config = with_control(self.configured(node), self.cluster.control)
        command = [*self.fabric.prefix(node), *child_command(Role.DECODE, name)]
        child = Child(name, command, first_line=child_input(config), log=subprocess.DEVNULL)
        await read_address(child, 100.0)
        return child

    async def pools(self) -> dict[tuple[str, str], float]:
        return {
            (member, name): value
            for member, counters in (await self.counters()).items()
            for name, value in counters.items()
            if name in POOLS
        }

    async def whole(self) -> dict[tuple[str, str], float]:
        """The pools of an idle system in which everybody has reported: of three traffic managers, two decode engines
        and the gateway."""

        async def reported() -> dict[tuple[str, str], float] | None:
            found = await self.pools()
            return found if len(found) == 6 else None

        found: dict[tuple[str, str], float] = await until(reported)
        return found

    async def retries(self) -> float:
        own = (await self.counters())["frontend"]
        return sum(value for name, value in own.items() if name.startswith("retries"))

    async def complete(self, prompt: list[int], count: int) -> list[int]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def received(self, node: str) -> int:
        """KV bytes that have come in on its compute NIC."""
        return next(
            at.bytes
            for at in self.fabric.stats()
            if (at.node, at.nic, at.direction, at.traffic_class) == (node, "cnic", "rx", "low")
        )


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What a condition, asked again and again, gives when it is no longer false."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(tmp_path: Path, **overrides: Any) -> AsyncIterator[System]:
    need_fabric()
    model = tiny_model(tmp_path / "models")
    places = {
        "scheduler": (Role.SCHEDULER, "ctl"),
        "frontend": (Role.FRONTEND, "ctl"),
        "gateway": (Role.STORAGE_GATEWAY, "store"),
        "prefill-0": (Role.PREFILL, "p0"),
        **{name: (Role.DECODE, node) for node, name in DECODES.items()},
    }
    with RunDirectory() as run, Fabric.up(1, 2, FAST, FAST) as fabric:

        def configured(node: str) -> Config:
            own: dict[str, Any] = {name.replace(".", "__"): value for name, value in fabric.settings(node).items()}
            return cluster_config(model, tmp_path / "blocks", **{**own, **overrides})

        processes = {
            name: Process(role, configured(node), tuple(fabric.prefix(node))) for name, (role, node) in places.items()
        }
        async with Processes(processes, run) as cluster, httpx.AsyncClient(base_url=fabric.url, timeout=90) as http:
            system = System(fabric, configured, cluster, http, Reference(model))
            yield system


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=650)


@pytest.mark.timeout(170)
async def test_a_transfer_slower_than_its_deadline_is_tried_again(tmp_path: Path) -> None:
    """The decode nodes' NICs are so slow that the prompt's KV is late, until somebody mends them."""
    async with running(tmp_path, timeouts__transfer_s=1.5, frontend__max_attempts=8) as system:
        baseline = await system.whole()
        assert await system.complete(prompt_of(1), 4) == system.reference.greedy(prompt_of(1), 4)
        for node in DECODES:
            system.fabric.set_rate(node, "cnic", SLOW)
        late = asyncio.create_task(system.complete(prompt_of(2), 8))
        await until(system.retries)
        assert not late.done()
        for node in DECODES:
            system.fabric.set_rate(node, "cnic", FAST)
        assert await late == system.reference.greedy(prompt_of(2), 8)
        assert await system.complete(prompt_of(2), 8) == system.reference.greedy(prompt_of(2), 8)

        async def back() -> bool:
            return await system.pools() == baseline

        await until(back)


@pytest.mark.timeout(170)
async def test_a_cable_pulled_in_mid_transfer_costs_an_attempt_and_its_node(tmp_path: Path) -> None:
    """The decode node that is receiving falls silent. Nobody can know whether it still writes, so it is given up, and
    gives up itself; another one takes the request, well before the deadline of what was on its way. Plugged in and
    started again it serves as before."""
    timeouts = {"timeouts__heartbeat_s": 0.2, "timeouts__heartbeat_timeout_s": 2.0, "timeouts__transfer_s": 60.0}
    async with running(tmp_path, **timeouts) as system:
        baseline = await system.whole()
        assert await system.complete(prompt_of(1), 4) == system.reference.greedy(prompt_of(1), 4)
        before = {node: system.received(node) for node in DECODES}
        for node in DECODES:
            system.fabric.set_rate(node, "cnic", SLOW)
        asked = asyncio.create_task(system.complete(prompt_of(2), 8))
        victim = await until(lambda: next((n for n in before if system.received(n) > before[n] + 60_000), None))
        (other,) = DECODES.keys() - {victim}
        system.fabric.link(victim, "cnic", False)
        system.fabric.set_rate(other, "cnic", FAST)
        async with asyncio.timeout(50):  # for a machine that is busy; it is a matter of heartbeat_timeout_s
            assert await asked == system.reference.greedy(prompt_of(2), 8)
        assert await system.retries() >= 1
        async with asyncio.timeout(30):
            assert await system.cluster.death() == (DECODES[victim], 1)
        left = {place: free for place, free in baseline.items() if not place[0].startswith(DECODES[victim])}

        async def back() -> bool:
            return await system.pools() == left

        await until(back)
        system.fabric.set_rate(victim, "cnic", FAST)
        system.fabric.link(victim, "cnic", True)
        again = await system.restart(DECODES[victim], victim)
        try:

            async def whole() -> bool:
                return await system.pools() == baseline

            await until(whole)
            system.fabric.link(other, "cnic", False)
            assert await system.complete(prompt_of(3), 8) == system.reference.greedy(prompt_of(3), 8)
        finally:
            again.kill()
