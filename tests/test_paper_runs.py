"""The paper's figures end to end, on small runs of the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.perf.compute import ComputeModel
from common.perf.hardware import get_hardware
from loadgen.cli import app
from loadgen.paper.calibration import OFFLINE, ONLINE, batch_tokens
from loadgen.paper.cases import QUICK, Case, Runner, Size, mean_latency
from loadgen.paper.exhibits import EXHIBITS
from loadgen.paper.offline import over
from loadgen.paper.published import PUBLISHED, Role
from loadgen.paper.scale import figure13
from loadgen.report.html import read_results, write_report
from loadgen.simulator.steady import get_stream
from loadgen.systems import BATCH_TOKENS
from loadgen.workload.load import Offline, Online

TINY = Size(turns=2, online_turns=2, duration_s=20.0)
SMALL = Case("dualpath", "1P1D", "ds-27b", "32K", agents=32)
LARGER = replace(SMALL, nodes="2P2D", agents=200)


def stream(case: Case):  # type: ignore[no-untyped-def]
    return get_stream(case.source, case.cluster.limit, TINY.online_turns, 0)


def test_a_case_runs_once_and_says_where_it_belongs() -> None:
    runner = Runner(TINY)
    run = runner.run(SMALL)
    assert runner.run(SMALL) is run and len(runner.results) == 1
    assert (run["system"], run["model"], run["nodes"], run["agents"], run["mal"]) == (
        "dualpath",
        "ds-27b",
        "1P1D",
        32,
        32768,
    )
    assert run["job_s"] == run["makespan_s"] > run["jct_s"]["p50"], "a small cluster plays whole trajectories"
    assert Runner(TINY).run(SMALL)["job_s"] == run["job_s"], "decided by the seed"
    larger = runner.run(LARGER)
    assert larger["job_s"] == pytest.approx(200 * stream(LARGER).mean_turns / larger["turns_per_s"])
    assert larger["makespan_s"] is None


def test_ratios_of_systems_are_of_the_same_job() -> None:
    runner, case = Runner(TINY), LARGER
    assert over(runner, case, "dualpath", "dualpath") == 1
    gain = over(runner, case, "basic", "dualpath")
    assert gain > 1.3 and over(runner, case, "dualpath", "basic") == pytest.approx(1 / gain)


def test_a_rate_of_whole_trajectories_is_one_of_turns() -> None:
    """0.2 agents/s of 60 turns each are 12 turns/s: in 20 s, with windows of 2 turns, about 120 windows."""
    case = replace(SMALL, agents=0, aps=0.2)
    runner = Runner(TINY)
    scenario = runner._scenario(case, stream(case))
    assert isinstance(scenario.load, Online)
    assert len(scenario.load.arrivals) == pytest.approx(120, abs=35)
    assert all(len(arrival.trajectory.turns) <= 2 for arrival in scenario.load.arrivals)
    run = runner.run(case)
    # as many turns as a trajectory has, but for a window's tokens, which are not quite the set's mean
    turns = run["turns"] / run["trajectories"]["completed"]
    assert run["trajectory_s"] == pytest.approx(run["jct_s"]["mean"] / turns * 60, rel=0.1)
    assert 0 < mean_latency(run, "tpot") < mean_latency(run, "ttft")


def test_how_a_job_begins() -> None:
    case = replace(SMALL, first_turns=3)
    scenario = Runner(TINY)._scenario(case, stream(case))
    assert isinstance(scenario.load, Offline) and not scenario.load.whole
    assert len(scenario.load.trajectories) == 64
    assert {len(one.turns) for one in scenario.load.trajectories} == {3}
    assert all(one.turns[0].context == 0 for one in scenario.load.trajectories)


def test_each_kind_of_load_has_its_calibration_and_every_system_the_same() -> None:
    online = replace(SMALL, agents=0, aps=0.2)
    assert SMALL.calibrated is OFFLINE and online.calibrated is ONLINE
    runner = Runner(TINY)
    basic, dualpath = (runner._scenario(replace(SMALL, system=s), stream(SMALL)) for s in ("basic", "dualpath"))
    assert basic.cluster == dualpath.cluster and basic.overheads == dualpath.overheads == OFFLINE.overheads
    # without a quota, a fixed budget: as many new tokens as the quota admits of mean turns on the default hardware
    turn = basic.mean_turn
    quota_turns = 0.3 / ComputeModel(basic.cluster.model, get_hardware("h800")).prefill_attention_s(turn.hit, turn.miss)
    assert basic.batch_tokens == batch_tokens(basic.cluster, turn) == int(quota_turns * turn.miss)
    online_basic = runner._scenario(replace(online, system="basic"), stream(online))
    assert online_basic.batch_tokens == basic.batch_tokens, "fixed, under every calibration"
    assert dualpath.batch_tokens == BATCH_TOKENS


def test_a_figure_shows_both_read_policies() -> None:
    class Smaller(Runner):
        def run(self, case: Case) -> dict[str, object]:
            return super().run(replace(LARGER, system=case.system))

    names = {row.name: row.ours for row in figure13(Smaller(TINY)).rows}
    assert set(names) == {"snic_max_over_avg_round_robin", "snic_max_over_avg"}
    assert all(value is not None and value >= 1 for value in names.values())


def test_the_command_writes_what_the_report_shows(tmp_path: Path) -> None:
    out = tmp_path / "table1.json"
    told = CliRunner().invoke(app, ["paper", "table1", "--out", str(out)])
    assert told.exit_code == 0 and "Cache-to-compute ratio" in told.stdout
    result = json.loads(out.read_text())
    assert "s of CPU time" in told.stdout and result["cpu_s"] >= 0
    assert result["kind"] == "paper" and result["ratios"]["cache_to_compute_ds-v3.2_32.7k"] == pytest.approx(
        21.5, rel=0.01
    )
    for calibration in result["calibration"].values():
        assert calibration["fitted_to"] and calibration["constants"]["linear_experts"]["default"] == 0.15
    page = tmp_path / "report.html"
    write_report(read_results(tmp_path), page)
    text = page.read_text()
    assert "Table 1" in text and "fitted (Table 1)" in text and "Calibration" in text


class Tiny(Runner):
    """Every case stands for a job of the same kind on a small cluster."""

    def run(self, case: Case) -> dict[str, Any]:
        tiny = replace(SMALL, system=case.system, first_turns=case.first_turns, calibration=case.calibration)
        load: dict[str, Any] = {"aps": 0.2} if case.aps else {"agents": 16}
        result = super().run(replace(tiny, **{"agents": 0, "aps": 0.0, **load}))
        return result | {name: getattr(case, name) for name in ("model", "nodes", *load)}


def test_all_of_them_are_printed_written_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.paper.cli.Runner", Tiny)
    monkeypatch.setattr("loadgen.paper.cli.QUICK", TINY)
    out = tmp_path / "all.json"
    told = CliRunner().invoke(app, ["paper", "all", "--quick", "--out", str(out)])
    assert told.exit_code == 0, told.exception
    result = json.loads(out.read_text())
    assert [exhibit["name"] for exhibit in result["exhibits"]] == list(EXHIBITS)
    for exhibit in result["exhibits"]:
        assert f"{exhibit['name']}: {exhibit['title']}"[:40] in told.stdout and exhibit["rows"]
    ratios = result["ratios"]
    held_out = {name for name, told in PUBLISHED.items() if told.role is Role.HELD_OUT}
    # the rate of like latency is not to be found where TTFT does not depend on the rate; quick jobs have no tail
    assert held_out - ratios.keys() == {"aps_44p88d_over_2p4d", "jct_s_48p96d"}
    assert ratios["heldout_count"] == len(held_out) - 2 and ratios["heldout_median_error"] > 0
    names = {"heldout_median_error", "heldout_max_error", "heldout_count", "heldout_unexplained"}
    assert {name for name in ratios if name.startswith("heldout_")} == names
    page = tmp_path / "report.html"
    write_report(read_results(tmp_path), page)
    text = page.read_text()
    assert all(f"<h2>{exhibit['name']}: " in text for exhibit in result["exhibits"])


def test_unknown_figures_are_refused_with_the_nearest() -> None:
    told = CliRunner().invoke(app, ["paper", "fig99"])
    assert told.exit_code == 2
    assert set(EXHIBITS) >= {"table1", "table2", "table3", "workingset", *(f"fig{n}" for n in (3, *range(7, 16)))}
    assert QUICK.turns and "--quick" in QUICK.statement
