"""What is made of measured round trips, by hand; and the processes that measure them, over loopback."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.config import NetworkConfig
from common.errors import ConfigError
from common.isolation.latency import Latency, Slowdown, isolates, latency_of, slowdown
from common.isolation.phases import Place, bulk_from, ping_from, target_at
from common.isolation.side import Role, Task, read_task
from common.transport.base import Intent
from loadgen.bench.isolation_result import result_of
from loadgen.cli import app
from loadgen.report.html import write_report

TCP = Place("127.0.0.1", NetworkConfig(transport="tcp"))

# -- pure --


def test_percentiles_are_nearest_rank():
    assert latency_of([n / 1000 for n in range(100, 0, -1)]) == Latency(100, 0.050, 0.099)
    assert latency_of([0.003, 0.001, 0.002]) == Latency(3, 0.002, 0.003)
    assert latency_of([0.5]) == Latency(1, 0.5, 0.5)
    with pytest.raises(ValueError, match="no round trip"):
        latency_of([])


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=300))
def test_percentiles_are_values_that_were_measured(values):
    latency = latency_of(values)
    assert latency.p50_s in values and latency.p99_s in values and latency.p50_s <= latency.p99_s
    assert sum(value <= latency.p50_s for value in values) >= len(values) / 2
    assert sum(value > latency.p99_s for value in values) <= len(values) / 100


def test_the_paper_s_figure_is_isolation():
    """131 us idle, 877 unisolated, 141 isolated: 6.7 and 1.08 times."""
    idle, unisolated, isolated = (Latency(1000, p50, 2 * p50) for p50 in (131e-6, 877e-6, 141e-6))
    assert slowdown(unisolated, idle).p50 == pytest.approx(6.69, abs=0.01)
    assert isolates(slowdown(unisolated, idle), slowdown(isolated, idle)) is True


@pytest.mark.parametrize(
    ("unisolated", "isolated", "verdict"),
    [
        (Slowdown(5.0, 3.0), Slowdown(1.3, 2.0), True),
        (Slowdown(5.0, 3.0), Slowdown(1.31, 1.0), False),
        (Slowdown(5.0, 3.0), Slowdown(1.0, 2.01), False),
        (Slowdown(4.9, 30.0), Slowdown(1.0, 1.0), None),
    ],
)
def test_the_verdict_needs_contention(unisolated, isolated, verdict):
    assert isolates(unisolated, isolated) is verdict


def rounds() -> list[dict[str, Latency]]:
    """Idle 1 ms; three rounds in which the other phases are slower by whole factors."""
    return [
        {
            "idle": Latency(200, 0.001, 0.002),
            "unisolated": Latency(150, 0.001 * slow, 0.002 * slow),
            "isolated": Latency(200, 0.001 * fast, 0.002 * fast),
        }
        for slow, fast in ((10, 1.0), (30, 1.5), (20, 1.1))
    ]


def test_ratios_are_of_a_round_and_the_median_counts():
    result = result_of(rounds(), {"rate_bytes_per_s": 1})
    assert result["ratios"] == pytest.approx(
        {
            "unisolated_over_idle_p50": 20,
            "unisolated_over_idle_p99": 20,
            "isolated_over_idle_p50": 1.1,
            "isolated_over_idle_p99": 1.1,
        }
    )
    assert result["spreads"]["isolated_over_idle_p50"] == pytest.approx([1.0, 1.5, 1.1])
    assert result["isolation"]["unisolated"] == pytest.approx({"n": 450, "p50_us": 20_000, "p99_us": 40_000})
    assert {name: flag["ok"] for name, flag in result["validity"].items()} == {"isolation": True, "samples": True}


def test_what_is_no_isolation_is_said_so():
    for measured in (slow := rounds()):
        measured["isolated"] = measured["unisolated"]
    flag = result_of(slow, {})["validity"]["isolation"]
    assert flag["ok"] is False and "20.00 x idle at p50 (at most 1.3)" in flag["detail"]
    for measured in (calm := rounds()):
        measured["unisolated"] = measured["isolated"]
    assert "there was no contention" in result_of(calm, {})["validity"]["isolation"]["detail"]


def test_the_report_shows_it(tmp_path):
    out = tmp_path / "report.html"
    write_report([result_of(rounds(), {"network": "two namespaces"})], out)
    page = out.read_text()
    assert "Isolation of the high class" in page and "two namespaces" in page
    assert "<td>unisolated</td><td>450</td><td>20,000</td><td>40,000</td><td>20.0</td>" in page
    assert "isolated_over_idle_p50" in page and "All validity flags hold" in page
    for measured in (slow := rounds()):
        measured["isolated"] = measured["unisolated"]
    write_report([result_of(slow, {})], out)
    assert "Validity flags that do not hold" in out.read_text()


@given(st.sampled_from(list(Role)), st.sampled_from(list(Intent)), st.integers(1, 9))
def test_a_task_is_one_line(role, intent, flows):
    task = Task(role, "10.0.0.1", {"transport": "tcp"}, "00", intent, 2.5, flows)
    line = task.line()
    assert line.endswith("\n") and line.count("\n") == 1 and json.loads(line) == json.loads(json.dumps(asdict(task)))
    assert read_task(line) == task


# -- processes --


async def test_pings_are_measured_alone_and_under_bulk():
    async with target_at(TCP) as small, target_at(TCP) as big:
        idle = await ping_from(TCP, small, 0.2)
        assert idle.count > 3 and 0 < idle.p50_s <= idle.p99_s
        async with bulk_from([TCP], big, Intent.KV_LOAD, 2):
            assert (await ping_from(TCP, small, 0.2)).count > 0


async def test_a_target_that_is_gone_is_an_error_and_nothing_stays():
    async with target_at(TCP) as gone:
        pass
    with pytest.raises(ConfigError, match="measuring isolation: ping: "):
        await ping_from(TCP, gone, 0.2)
    before = asyncio.all_tasks()
    with pytest.raises(ConfigError, match="measuring isolation: bulk: "):
        async with bulk_from([TCP], gone, Intent.KV_LOAD, 1):
            pytest.fail("there is nobody to write to")
    assert asyncio.all_tasks() == before


# -- the command --


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--rate", "fast"], "--rate 'fast' is not a rate"), (["--out", "/nowhere/r.json"], "no such directory")],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(arguments, reason):
    told = CliRunner().invoke(app, ["bench", "isolation", *arguments])
    assert told.exit_code == 2 and reason in told.stderr
