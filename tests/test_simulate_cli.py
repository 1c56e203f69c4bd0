"""`loadgen simulate`: what it refuses, what it writes, and the runs of a live result simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.cli import app
from loadgen.experiments.setting import Setting
from loadgen.report.html import read_results, write_report
from loadgen.simulator import simulate
from loadgen.studies.like import medians, read_live, scenario_of, setting_of, simulate_like

SMALL = ["--cluster", "1P1D", "--model", "ds-27b", "--gpus", "2", "--agents", "6", "--turns", "2"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "--progress", "none", *arguments])


@pytest.mark.parametrize(
    ("arguments", "rule", "nearest"),
    [
        (["--cluster", "0P4D", "--agents", "3"], "a node of each role at least", "1P4D"),
        (["--cluster", "two", "--agents", "3"], "is not a shape", "2P4D"),
        (["--cluster", "1P1D", "--agents", "3"], "ds-660b does not fit", "2P4D"),
        (["--gpus", "9", "--agents", "3"], "a node has 8", "8"),
        (["--gpus", "0", "--agents", "3"], "a node has 8", "1"),
        (["--model", "ds-660", "--agents", "3"], "is unknown", "ds-660b"),
        (["--workload", "63k", "--agents", "3"], "is unknown", "64K"),
        (["--system", "dual", "--agents", "3"], "is unknown", "dualpath"),
        (["--buffer", "8GB", "--agents", "3"], "a context of 65,536 tokens has 2.62 GB of KV", "--buffer 21GB"),
        (["--buffer", "much", "--agents", "3"], "is not a size", "80GB"),
        (["--agents", "0"], "must be above 0", "1"),
        (["--agents", "5", "--trajectories", "4"], "plays one at least", "5"),
        (["--agents", "3", "--aps", "1", "--duration", "9"], "one of them", "--agents"),
        ([], "one of them", "--agents"),
        (["--aps", "1"], "go together", "--duration"),
        (["--trajectories", "4", "--aps", "1", "--duration", "9"], "is of a job", "--agents"),
        (["--agents", "3", "--gaps", "traced"], "have no times", "10,1"),
        (["--agents", "3", "--incident", "burn:p0@1"], "'burn' is none", "fail"),
        (["--agents", "3", "--incident", "fail:p7@1"], "the nodes are p0", "p1"),
        (["--agents", "3", "--like", "x.json"], "--like takes", "--system"),
        (["--like", "no-such-file.json"], "no-such-file.json", "--out"),
    ],
)
def test_bad_input_is_refused_at_once_with_the_rule_and_a_way_out(
    arguments: list[str], rule: str, nearest: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert rule in result.output and nearest in result.output
    assert "Traceback" not in result.output


def test_a_result_that_the_report_shows(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = run(*SMALL, "--system", "basic", "--system", "dualpath", "--out", str(out))
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert [one["system"] for one in told["runs"]] == ["basic", "dualpath"]
    assert told["ratios"]["makespan_basic_over_dualpath"] > 1
    assert all(one["turns"] == one["offered"] == 12 for one in told["runs"])
    assert "policy" in result.output
    write_report(read_results(tmp_path), tmp_path / "r.html")
    assert "dualpath" in (tmp_path / "r.html").read_text()


def test_online(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    load = ["--cluster", "1P1D", "--model", "ds-27b", "--aps", "0.5", "--duration", "30", "--turns", "2"]
    assert run(*load, "--out", str(out)).exit_code == 0
    (told,) = json.loads(out.read_text())["runs"]
    assert told["verdict"]["met"] and "job_completion_s" not in told["bounds"]["systems"]["basic"]


@pytest.fixture(scope="module")
def live() -> dict[str, Any]:
    """As a live result would be, of a cluster that behaves as simulated."""
    setting = Setting(model="ds-27b", prefill=1, decode=1, time_factor=5.0, turns=2)
    head = setting.describe("shaped by the kernel")
    run = {
        "system": "dualpath",
        "repeat": 0,
        "agents": 6,
        "placement": "shaped by the kernel",
        "offered": 24,
        "makespan_s": None,
        "slo": {"ttft_s": 4.0, "tpot_s": 0.05},
        **setting.place(),
    }
    result = {**head, "runs": [run]}
    told = simulate(scenario_of(setting_of(result, run), result, run))
    scale = setting.scaling.byte_scale
    told["nic_bytes"] = {name: value / scale for name, value in told["nic_bytes"].items()}
    return {**result, "runs": [{**run, **told}]}


def test_the_runs_of_a_live_result_simulated(live: dict[str, Any], tmp_path: Path) -> None:
    (pair,) = simulate_like(live)
    assert pair.differences()["bytes per NIC"] < 1e-6
    assert all(abs(value) < 1e-6 for value in medians([pair]).values())
    path = tmp_path / "live.json"
    path.write_text(json.dumps(live))
    assert read_live(path)["runs"]
    result = run("--like", str(path), "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "off by" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["ratios"]["JCT s off by percent"] < 1e-6


def test_the_scaled_cluster_is_the_live_one(live: dict[str, Any]) -> None:
    (told,) = live["runs"]
    setting = setting_of(live, told)
    cluster = scenario_of(setting, live, told).cluster
    assert (cluster.engines, cluster.gpus, cluster.moved_layers, cluster.copies_free) == (1, 1, 8, True)
    scale = setting.scaling.byte_scale * setting.scaling.time_factor
    assert cluster.snic_rate == pytest.approx(setting.scaling.snic_rate * scale)
    assert cluster.limit == pytest.approx(setting.limit, abs=64)
