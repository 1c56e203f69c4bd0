"""Every query of every dashboard and rule, asked of a real Prometheus that scrapes a real cluster under load.

Needs Debian's packages prometheus and chromium. Screenshots are in pytest's temporary directory.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from common.config import load_config
from common.messages import Status
from common.types import Role
from services.launcher.status import get_status
from tests.browser import look, screenshot
from tests.dashboard_page import write_page
from tests.dashboards_support import (
    DASHBOARDS,
    PROMETHEUS,
    SCRAPE_S,
    Asked,
    Prometheus,
    panel_queries,
    panels,
    prometheus,
    rule_queries,
    scrape_jobs,
)
from tests.launch_harness import Launched, launched

pytestmark = pytest.mark.pictures

#: Counters by label that have no series until there is something to count, and why there is nothing here.
IDLE = {
    "dualpath_messages_dropped_total": "no message is lost",
    "dualpath_rdma_doorbells_total": "no RDMA device",
    "dualpath_rdma_writes_total": "no RDMA device",
    "dualpath_retries_total": "no attempt is lost",
    "dualpath_stale_messages_total": "nobody speaks for an attempt that has ended",
    "dualpath_storage_failed_puts_total": "the store takes everything",
    "dualpath_transport_failures_total": "no transfer fails",
    "dualpath_transport_refused_total": "no stranger knocks",
}
CONFIG = """
[model]
profile = "ds-27b"
[network]
snic_rate = 2e8                 # paced, so that bytes wait for NICs
cnic_rate = 2e9
[scheduler]
read_side = "round_robin"       # both paths
[frontend]
max_pending = 12
[perf]
time_factor = 0.1
"""
BLOCK, TURN = 64, 130
#: As Grafana does, for this scrape interval.
RATE = f"{max(4 * SCRAPE_S, 10)}s"


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_and_rules_are_good() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "rules.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "rules_test.yml")


@dataclass(frozen=True, slots=True)
class Scraped:
    """A cluster and the Prometheus that scrapes it. answered: calls that clients had an answer to."""

    status: Status
    asked: Prometheus
    answered: int


def _status(run: Launched) -> Status:
    control = re.search(r"scheduler (tcp://\S+)", run.stderr)
    assert control is not None
    return asyncio.run(get_status(load_config(overrides={"scheduler.control": control[1]})))


def _targets(status: Status) -> dict[str, dict[str, list[str]]]:
    """By job and role."""
    jobs: dict[str, dict[str, list[str]]] = {name: {} for name in scrape_jobs()}
    for member in (entry.member for entry in status.members):
        manager = member.role is Role.TRAFFIC_MANAGER
        job = jobs["dualpath-traffic-managers" if manager else "dualpath"]
        role = "prefill" if manager else member.role.value  # DNS tells only whose traffic manager it is
        job.setdefault(role, []).append(member.health.removeprefix("http://"))
    return jobs


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Under load for a while, with a client that gives up, calls that are refused and a block that is damaged."""
    directory = tmp_path_factory.mktemp("scraped")
    file = directory / "cluster.toml"
    file.write_text(CONFIG)
    arguments = ("up", "--config", str(file), "--port", "0", "--prefill", "2", "--decode", "2")
    small = {"DUALPATH_STORAGE__PATH": str(directory / "blocks")}
    with launched(directory / "run", *arguments, **small) as run:
        run.until(lambda: "/v1 (" in run.stderr and "logs " in run.stderr, seconds=120)
        address = re.search(r"at (http://\S+)/v1 ", run.stderr)
        assert address is not None
        status = _status(run)
        with prometheus(directory, _targets(status)) as asked:
            answered = asyncio.run(_trouble_and_load(address[1], directory / "blocks"))
            asked.at = time.time()
            yield Scraped(status, asked, answered)
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait(60)


async def _trouble_and_load(url: str, blocks: Path) -> int:
    """How many calls were answered. Prometheus has seen the end of it."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        kept = [5] * TURN
        statuses = [await _complete(http, kept)]
        for block in await _stored(blocks, TURN // BLOCK):
            content = bytearray(block.read_bytes())
            content[-1] ^= 1
            block.write_bytes(content)
        statuses += await asyncio.gather(*(_complete(http, kept) for _ in range(30)))
        assert set(statuses) == {200, 503}, "some are refused"
        with pytest.raises(httpx.ReadTimeout):
            await _complete(http, kept, max_tokens=5000, timeout=1)
        for turns in await asyncio.gather(*(_agent(http, seed, turns=12, pause_s=SCRAPE_S) for seed in range(4))):
            statuses += turns
    await asyncio.sleep(3 * SCRAPE_S)
    return statuses.count(200)


async def _stored(blocks: Path, count: int) -> list[Path]:
    """The files of blocks, once there are so many."""
    async with asyncio.timeout(20):
        while len(files := [*(blocks / "blocks").glob("*/*")]) < count:
            await asyncio.sleep(0.1)
    return files


async def _complete(http: httpx.AsyncClient, prompt: list[int], max_tokens: int = 20, timeout: float = 60) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body, timeout=timeout)).status_code


async def _agent(http: httpx.AsyncClient, seed: int, turns: int, pause_s: float) -> list[int]:
    """Each turn's prompt begins with the one before."""
    rng, prompt, statuses = random.Random(seed), [], []
    for _ in range(turns):
        prompt += [rng.randrange(1000) for _ in range(TURN)]
        statuses.append(await _complete(http, prompt))
        await asyncio.sleep(pause_s)
    return statuses


def test_every_process_is_found_and_answers(scraped: Scraped) -> None:
    targets = scraped.asked.get("targets", state="active")["activeTargets"]
    assert {target["health"] for target in targets} == {"up"}, targets
    found = sorted((target["labels"]["role"], target["labels"]["instance"]) for target in targets)
    members = [entry.member for entry in scraped.status.members]
    assert found == sorted((member.role.value, member.health.removeprefix("http://")) for member in members)
    assert len({role for role, _ in found}) == len(Role)
    told = scraped.asked.get("query", query="dualpath_process_info")["result"]
    assert sorted(each["metric"]["name"] for each in told) == sorted(member.name for member in members)
    assert all("exported_role" not in each["metric"] for each in told)


def _empty(asked: Prometheus, queries: list[Asked]) -> dict[str, str]:
    """Those that show nothing, by where they stand."""
    return {
        query.place: query.expr
        for query in queries
        if not asked.numbers(query.expr.replace("$__rate_interval", RATE)) and not query.names & IDLE.keys()
    }


def test_every_panel_shows_something(scraped: Scraped) -> None:
    assert _empty(scraped.asked, panel_queries()) == {}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_browser_shows_every_panel(path: Path, scraped: Scraped, tmp_path: Path) -> None:
    page = tmp_path / "dashboard.html"
    size = write_page(path, page, scraped.asked, RATE, since_s=60)
    screenshot(page, tmp_path / f"{path.stem}.png", *size)
    plots = {plot["alt"]: plot for plot in look(page, tmp_path)}
    assert plots.keys() == {panel["title"] for panel in panels(path) if panel["type"] == "timeseries"}
    for plot in plots.values():
        assert plot["natural"] > 200 and plot["shown"] > 200 and 0.005 < plot["drawn"] < 0.9, plot


def test_every_measure_is_recorded(scraped: Scraped) -> None:
    recorded = rule_queries("record")
    assert _empty(scraped.asked, recorded) == {}
    assert _empty(scraped.asked, [Asked(rule.place, rule.place) for rule in recorded]) == {}


def test_no_rule_fails_and_alerts_look_at_what_is_there(scraped: Scraped) -> None:
    states = [rule for group in scraped.asked.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in states} == {"ok"}, states
    looked_at = [
        Asked(f"{alert.place}: {selector}", f"count({selector})")
        for alert in rule_queries("alert")
        for selector in alert.selectors
    ]
    assert len(looked_at) >= 10 and _empty(scraped.asked, looked_at) == {}


def test_what_is_shown_is_what_happened(scraped: Scraped) -> None:
    asked = scraped.asked
    assert asked.numbers('sum(dualpath_requests_total{outcome="length"})') == [scraped.answered]
    assert asked.numbers("sum(dualpath_time_to_first_token_seconds_count)") == [scraped.answered]
    assert asked.numbers('sum(dualpath_requests_refused_total{reason="overloaded"})')[0] > 0
    assert asked.numbers('sum(dualpath_requests_total{outcome="cancelled"})')[0] >= 1
    assert asked.numbers('sum(dualpath_storage_blocks_quarantined_total{reason="checksum"})')[0] >= 1
    assert asked.numbers('sum by (role) (dualpath_members{role=~"prefill|decode"})') == [2, 2]
    assert {"pe", "de"} <= set(asked.get("label/path/values"))
    ratio = asked.numbers("dualpath:cached_tokens:ratio_rate1m")[0]
    assert 0.3 < ratio < 1, "agents' prompts begin with what is stored"


def test_idle_counters_are_exported_all_the_same(scraped: Scraped) -> None:
    names = set()
    for entry in scraped.status.members:
        text = httpx.get(f"{entry.member.health}/metrics", timeout=10).text
        names |= set(re.findall(r"^# TYPE (\S+) counter", text, re.MULTILINE))
    assert IDLE.keys() <= names
