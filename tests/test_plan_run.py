"""The planner end to end, on small loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.perf.hardware import HARDWARE
from loadgen.measures.turns import Slo
from loadgen.plan.planner import make_plan
from loadgen.plan.rules import asked
from services.launcher.plan import findings, plan_table
from tests.launch_harness import launched

NODE = HARDWARE["h800"]


def planned(aps: float, nodes: str | None = None, slo: Slo = Slo(), system: str = "dualpath") -> dict[str, Any]:
    return make_plan(asked("ds-27b", NODE, "32k", aps, system, slo, nodes), seed=0)


def test_a_light_load_fits_the_smallest_cluster() -> None:
    told = planned(0.05)
    assert told["best"]["shape"] == "1P1D" and told["best"]["met"]
    assert (told["range"]["least"], told["range"]["greatest"]) == pytest.approx((1 / 7, 3.5))
    turns_per_s = 0.05 * told["turns_per_trajectory"]
    assert told["demand"]["turns_per_s"] == pytest.approx(turns_per_s) == pytest.approx(3.0, rel=1e-2)
    # Little: KV of 0.05 agents/s, each for its JCT, half of 28,640 tokens of 19,680 bytes
    memory, run = told["memory"], told["best"]
    by_hand = 0.05 * run["trajectory_s"] * 28_640 * 19_680 / 2
    assert memory["working_set_bytes"] == pytest.approx(by_hand, rel=1e-3)
    assert memory["stored_a_day_bytes"] == pytest.approx(0.05 * 28_640 * 19_680 * 86_400, rel=1e-3)
    assert planned(0.05) == told, "the same question has the same answer"


def test_a_shape_that_is_too_small_is_told_as_such() -> None:
    told = planned(8.0, "1P1D")
    assert told["best"] is None and told["tried"][0]["fullest"] > 1
    assert "1P1D does not meet TTFT" in findings(told)[0] and told["tried"][0]["binds"] in findings(told)[0]


def test_more_load_takes_more_nodes_and_the_answer_is_in_the_table() -> None:
    told = planned(8.0)
    best = told["best"]
    assert best["nodes"] > 2 and best["met"]
    assert all(run["met"] is False for run in told["tried"] if run["nodes"] < best["nodes"])
    rows = plan_table(told).columns[0]._cells
    assert f"{best['shape']} *" in rows and len(rows) == len(told["tried"])


def test_objectives_that_nothing_meets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"none of 12 shapes up to \S+ meets TTFT 4 s and TPOT 0\.0001 s"):
        planned(0.05, slo=Slo(4.0, 1e-4))


def test_the_command(tmp_path: Path) -> None:
    options = ["--model", "ds-27b", "--workload", "32k", "--aps", "0.05", "--out", "plan.json"]
    with launched(tmp_path, "plan", *options) as run:
        assert run.wait(60) == 0, run.stderr
        assert run.left_behind() == ({}, [])
        assert "best: 1P1D" in run.stdout and "0.143 <= P/D <= 3.5" in run.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["best"]["shape"] == "1P1D"


def test_the_command_refuses_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "plan", "--gpus-per-node", "0") as run:
        assert run.wait(30) == 2
        assert "error: --gpus-per-node 0 must be from 1 to 64: the nearest is 1" in run.stderr
