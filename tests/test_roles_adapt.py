"""`loadgen adapt`: what is compared, how ratios are taken, and what it refuses."""

from __future__ import annotations

import json

import pytest
from pytest import approx
from typer.testing import CliRunner

from common.errors import ConfigError
from common.perf.models import MODELS
from loadgen.cli import app
from loadgen.report.html import read_results
from loadgen.report.html.page import render
from loadgen.studies.adapt import AGENTS_A_NODE, CASES, Experiment, ratios, spreads
from loadgen.workload.load import Offline, Online


def tiny(**others) -> Experiment:
    return Experiment(
        **{"model": MODELS["ds-660b"], "nodes": 5, "gpus": 1, "turns": 4, "rollout": 4, "duration_s": 40.0, "rounds": 1}
        | others
    )


def test_every_ratio_that_holds_the_model_is_compared_and_adapting_starts_at_one_to_two():
    assert [cluster.name for cluster in tiny(nodes=9).fixed] == ["2P7D", "3P6D", "4P5D", "5P4D", "6P3D", "7P2D"]
    assert tiny(nodes=9).start.name == "3P6D"
    assert [cluster.name for cluster in tiny(nodes=3, model=MODELS["ds-27b"]).fixed] == ["1P2D", "2P1D"]


def test_too_few_nodes_to_change_a_role():
    with pytest.raises(ConfigError, match="takes 2 of each role, and one more to change roles: the nearest is 5"):
        tiny(nodes=4)


def test_whole_rollouts_of_two_rounds_differ_too():
    first, other = (tiny(rollout=None).load("rollout", index)[0] for index in (0, 1))
    assert isinstance(first, Offline) and isinstance(other, Offline)
    assert {t.name for t in first.trajectories} != {t.name for t in other.trajectories}


@pytest.mark.parametrize("case", CASES)
def test_all_contenders_of_a_round_play_the_same_load(case):
    experiment = tiny()
    first, again = (experiment.load(case, 1)[0] for _ in range(2))
    other = experiment.load(case, 2)[0]
    assert first == again != other
    if case == "rollout":
        assert isinstance(first, Offline) and first.whole
        assert first.agents == len(first.trajectories) == round(AGENTS_A_NODE * 5 / 8)
    else:
        assert isinstance(first, Online)
        assert all(0 <= arrival.at < 40.0 for arrival in first.arrivals) and first.until_s > 3600
        assert len({arrival.name for arrival in first.arrivals}) == len(first.arrivals)


def test_ratios_are_against_the_best_fixed_ratio_of_each_measure_in_each_round():
    def run(nodes, repeat, makespan, ttft, switches=None):
        told = {"case": "rollout", "nodes": nodes, "adaptive": switches is not None, "repeat": repeat, "agents": 9}
        roles = {} if switches is None else {"roles": {"count": switches}}
        return {**told, "makespan_s": makespan, "ttft_ms": {"p99": ttft}, **roles}

    runs = [
        run("1P2D", 0, 100.0, 4.0), run("2P1D", 0, 120.0, 2.0), run("1P2D adaptive", 0, 90.0, 3.0, 2),
        run("1P2D", 1, 200.0, 4.0), run("2P1D", 1, 100.0, 5.0), run("1P2D adaptive", 1, 80.0, 2.0, 3),
    ]  # fmt: skip
    found = spreads(runs, "1P2D")
    assert found == {
        "jct_adaptive_over_best_static": [0.9, 0.8],
        "jct_adaptive_over_start": [0.9, 0.4],
        "ttft_p99_adaptive_over_best_static": [1.5, 0.5],
        "ttft_p99_adaptive_over_start": [0.75, 0.5],
        "switches": [2, 3],
    }
    assert ratios(found)["jct_adaptive_over_best_static"] == approx(0.85)
    assert spreads(runs[:2], "1P2D") == {}  # interrupted before the adaptive run


def test_the_command_writes_what_the_report_shows(tmp_path, monkeypatch):
    monkeypatch.setattr("loadgen.studies.adapt.AGENTS_A_NODE", 40.0)
    out = tmp_path / "adapt.json"
    command = ["adapt", "--quick", "--nodes", "5", "--case", "rollout", "--out", str(out), "--progress", "none"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_text())
    assert told["kind"] == "adapt" and told["config"]["start"] == "2P3D"
    assert [run["nodes"] for run in told["runs"]] == ["2P3D", "3P2D", "2P3D adaptive"]
    assert all(run["turns"] == run["offered"] for run in told["runs"])
    assert told["ratios"]["jct_adaptive_over_best_static"] == approx(
        told["runs"][2]["makespan_s"] / min(run["makespan_s"] for run in told["runs"][:2])
    )
    assert told["controller"]["least"] == 2 and told["runs"][2]["roles"]["controller"] == told["controller"]
    assert "jct_adaptive_over_best_static" in render(read_results(tmp_path))
    assert "2P3D adaptive" in done.output and "jct_adaptive_over_best_static" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--case", "rolout"], "the nearest is rollout"),
        (["--model", "ds-670b"], "the nearest is ds-660b"),
        (["--nodes", "3"], "the nearest is 5"),
    ],
)
def test_what_is_refused(options, says):
    done = CliRunner().invoke(app, ["adapt", *options])
    assert done.exit_code == 2 and says in done.output
