"""The event loops of a whole cluster under full load: CPU time by callback, as every process counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.clock import monotonic
from common.rundir import RunDirectory
from common.watchdog import BOUNDS_S, LIMIT_S, NAME, SLOW
from common.workload.text import IdText
from loadgen.client.endpoint import Client
from loadgen.experiments.placement import CONTROL, placed
from loadgen.experiments.setting import Setting, store_directory
from loadgen.measures.observe import Observer
from loadgen.measures.turns import RunLog
from loadgen.replay.agent import Agent
from loadgen.replay.closed_loop import replay

#: More than two cores can serve: nothing waits for a model, and reads, copies and tokens come as fast as they can.
AGENTS, WINDOWS, TIME_FACTOR = 24, 48, 0.5
SAMPLE_S, SCRAPE_S = 1.0, 10.0


async def measure_loops(seconds: float) -> dict[str, Any]:
    """Histograms by role after so many seconds at most of all that a cluster of 1P1D can do. ConfigError if it does not
    come up."""
    setting = Setting(prefill=1, decode=1, time_factor=TIME_FACTOR)
    windows = setting.windows(WINDOWS, 0)
    with (
        RunDirectory(store_directory(setting.blocks(WINDOWS))) as run,
        placed(1, 1, setting.scaling, False) as placement,
    ):
        lab = setting.lab(placement, run)
        async with lab.seeded(windows) as seeded, lab.cluster("dualpath", seeded) as cluster:
            config = lab.config("dualpath", CONTROL, seeded)
            async with (
                Client(cluster.url, config.timeouts.request_s) as client,
                Observer(cluster.control, config.security, SAMPLE_S) as observer,
            ):
                served = await client.model()
                log = RunLog(sum(len(window.turns) for window in windows), monotonic())
                text = IdText(lab.model().vocab_size)
                agent = Agent(client, served.name, text, log, False, lambda record, history, answer: None, True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await cluster.during(replay(agent, windows, AGENTS))
                members = [status.member for status in observer.samples[-1].members]
                roles = histograms([(member.role.value, await _scraped(member.health)) for member in members])
                slow = _slow(run.path)
    return {
        "load": f"{AGENTS} agents at once, 1P1D, {setting.model}, {len(log.turns)} turns ended",
        "limit_s": LIMIT_S,
        "roles": roles,
        "slow": slow,
    }


def _slow(logs: Path) -> list[str]:
    """What the processes have logged of callbacks over the limit."""
    found = []
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        found += [f"{path.stem}: {line.strip()}" for line in lines if SLOW in line]
    return found


async def _scraped(url: str) -> str:
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{url}/metrics", timeout=SCRAPE_S)).raise_for_status().text


def histograms(pages: Sequence[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """By role: callbacks within each bound of CPU seconds, all of them ("+Inf"), and how many took longer than LIMIT_S.
    pages: role and metrics of each process."""
    roles: dict[str, dict[str, float]] = {}
    for role, page in pages:
        told = roles.setdefault(role, dict.fromkeys((*map(str, BOUNDS_S), "+Inf"), 0.0))
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"dualpath_{NAME}_bucket":
                    told[sample.labels["le"]] += sample.value
    for told in roles.values():
        told["over_limit"] = told["+Inf"] - told[str(LIMIT_S)]
    return roles
