"""Paired rounds and their ratios; points of a sweep."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from common.errors import ConfigError
from loadgen.experiments.jobs import paired, plain, ratios, spreads
from loadgen.experiments.rates import Window, arrivals, capacities, capacity_ratios, full_aps
from loadgen.experiments.setting import Setting, interleaved
from loadgen.experiments.sizes import QUICK, Axis, varied
from loadgen.measures.turns import Slo
from loadgen.workload.source import Source


def run(system: str, repeat: int, job_s: float | None, snic: float | None = None) -> dict[str, Any]:
    balance = {"snic": {"mean": snic} if snic else None, "attention": None}
    return {"system": system, "repeat": repeat, "job_s": job_s, "makespan_s": None, "balance": balance}


RUNS = [
    run("basic", 0, 200.0, 1.2), run("dualpath", 0, 100.0, 1.05), run("oracle", 0, 98.0),
    run("oracle", 1, 90.0), run("dualpath", 1, 100.0, 1.07), run("basic", 1, 180.0),
    run("basic", 2, 300.0), run("dualpath", 2, None),
]


def test_systems_are_compared_round_by_round() -> None:
    assert paired(RUNS, "basic", "dualpath", "job_s") == [2.0, 1.8]
    assert spreads(RUNS)["jct_basic_over_dualpath"] == [2.0, 1.8]


def test_ratios_are_medians_under_names_to_look_up() -> None:
    assert ratios(RUNS) == pytest.approx({
        "jct_basic_over_dualpath": 1.9,
        "jct_basic_over_oracle": (200 / 98 + 2) / 2,
        "jct_dualpath_over_oracle": (100 / 98 + 100 / 90) / 2,
        "jct_reduction_dualpath_percent": (50 + 100 * (1 - 1 / 1.8)) / 2,
        "jct_reduction_oracle_percent": (51 + 50) / 2,
        "snic_max_over_avg_basic": 1.2,
        "snic_max_over_avg": 1.06,
    })


def test_balance_has_a_ratio_for_each_way_to_take_it() -> None:
    attention = {"mean": 1.4, "rounds": 1.04, "first_5_percent": {"until_s": 5.0, "mean": 1.5, "rounds": None}}
    runs = [run("dualpath", 0, 10.0), run("+dual", 0, 20.0), run("dualpath", 1, 10.0)]
    runs[0]["balance"]["attention"] = runs[1]["balance"]["attention"] = attention
    told = {name: value for name, value in ratios(runs).items() if name.startswith("attention")}
    assert told == {
        "attention_max_over_avg": 1.04, "attention_1s_max_over_avg": 1.4,
        "attention_max_over_avg_dual": 1.04, "attention_1s_max_over_avg_dual": 1.4,
    }


def test_names_of_systems_in_keys() -> None:
    assert [plain(name) for name in ("+dual", "basic+layerwise", "dualpath")] == ["dual", "basic_layerwise", "dualpath"]


def test_every_other_round_is_in_reverse() -> None:
    assert interleaved(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_points_of_a_sweep_change_one_thing() -> None:
    setting = Setting()
    more, size = varied(setting, QUICK, Axis.AGENTS, "24")
    assert (more, size.agents, size.windows) == (setting, 24, QUICK.windows // 2)  # windows grow along
    nodes, size = varied(setting, QUICK, Axis.NODES, "1P2D")
    assert (nodes.prefill, nodes.decode, size) == (1, 2, QUICK)
    assert varied(setting, QUICK, Axis.APPEND, "2")[0].workload.append_scale == 2.0
    assert varied(setting, QUICK, Axis.MAL, "32K")[0].max_length == 32_768


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
@pytest.mark.parametrize("axis", list(Axis))
def test_what_is_no_value_of_an_axis_is_named(axis: Axis, value: str) -> None:
    with pytest.raises(ConfigError, match=repr(value)):
        varied(Setting(), QUICK, axis, value)


@pytest.mark.parametrize(
    ("axis", "value"),
    [(Axis.APPEND, "nan"), (Axis.GENERATION, "inf"), (Axis.AGENTS, "1.5"), (Axis.AGENTS, "nan")],
)
def test_numbers_that_are_none_here(axis: Axis, value: str) -> None:
    with pytest.raises(ConfigError, match=f"sweep {axis}: '{value}' is not a .*number above 0"):
        varied(Setting(), QUICK, axis, value)
    with pytest.raises(ConfigError, match="leave --sessions out"):
        varied(Setting(workload=Source(sessions="file")), QUICK, Axis.MAL, "32K")


def test_arrivals_are_the_same_for_the_same_seed_and_play_different_windows() -> None:
    setting = Setting(turns=2)
    window = Window(10.0, Slo())
    coming = arrivals(setting, 2.0, window, seed=3)
    assert coming == arrivals(setting, 2.0, window, seed=3)
    assert all(0 <= arrival.at < 10 for arrival in coming)
    assert len({arrival.name for arrival in coming}) == len(coming)
    with pytest.raises(ConfigError, match="no agent arrives"):
        arrivals(setting, 1e-9, window, seed=0)


def test_arrivals_in_bursts_come_at_the_same_rate() -> None:
    setting = Setting(turns=1)

    def variation(cv: float) -> tuple[int, float]:
        times = [arrival.at for arrival in arrivals(setting, 5.0, Window(200.0, Slo(), cv), seed=0)]
        gaps = [after - before for before, after in pairwise(times)]
        return len(times), pstdev(gaps) / fmean(gaps)

    for cv in (0.3, 1.0, 2.0):
        count, found = variation(cv)
        assert count == pytest.approx(1000, rel=0.25)
        assert found == pytest.approx(cv, rel=0.25)
    assert Window(10.0, Slo(), 2.0).describe() == {"process": "Gamma", "cv": 2.0, "duration_s": 10.0}
    assert Window(10.0, Slo()).describe()["process"] == "Poisson"


def test_rate_of_whole_agents_on_whole_nodes() -> None:
    # 157 turns an agent on 8 GPUs a node instead of 4 turns on one
    assert full_aps(Setting(turns=4), 2.0) == pytest.approx(2.0 * 4 / 157 * 8, rel=0.01)


def test_capacity_out_of_runs() -> None:
    runs = [
        {"system": "basic", "aps": aps, "verdict": {"met": met}}
        for aps, met in ((1.0, True), (1.4, False), (1.2, True), (1.3, False))
    ]
    runs.append({"system": "oracle", "aps": 2.0, "verdict": {"met": False}})
    found = capacities(Setting(), runs)
    assert (found["basic"]["aps"], found["basic"]["failed_aps"]) == (1.2, 1.3)
    assert (found["oracle"]["aps"], found["oracle"]["failed_aps"]) == (None, 2.0)
    assert found["basic"]["bound_aps"] < found["oracle"]["bound_aps"]


def test_capacity_ratios() -> None:
    found = {"basic": {"aps": 0.5}, "dualpath": {"aps": 1.2}, "+dual": {"aps": None}}
    assert capacity_ratios(found) == {"aps_dualpath_over_basic": pytest.approx(2.4)}
