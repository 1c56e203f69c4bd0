"""The HTML report: numbers of a hand-made experiment; figures where there is something to show; escapes."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from common.errors import ConfigError
from loadgen.measures.outcome import Witness, outcome
from loadgen.measures.turns import RunLog, Slo, TrajectoryRecord, TurnRecord
from loadgen.report.html import read_results, write_report
from loadgen.report.html.jobs import ablation_figure, sweep_figure
from loadgen.report.html.latency import online_figure
from loadgen.report.html.runs import broken_flags, ratios, read_runs, telling
from loadgen.report.html.style import LOOKS, title
from loadgen.report.html.tables import system_table
from loadgen.systems import SYSTEMS

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # of a figure whose parts do not fit

PLACE = {"model": "ds-660b", "nodes": "2P4D", "agents": 64, "mal": 65_536}
BOUNDS = {
    "systems": {
        "basic": {"bound_by": "storage NICs of the prefill nodes", "job_completion_s": 180.0},
        "dualpath": {"bound_by": "prefill compute", "job_completion_s": 80.0},
        "oracle": {"bound_by": "prefill compute", "job_completion_s": 80.0},
    }
}


def job(system: str, repeat: int, job_s: float, **more: Any) -> dict[str, Any]:
    return {"system": system, "repeat": repeat, "job_s": job_s, **more}


def compared() -> dict[str, Any]:
    """Two repeats: Basic 200 and 240 s, DualPath 100 and 150, Oracle 80 and 100."""
    times = {"basic": (200.0, 240.0), "dualpath": (100.0, 150.0), "oracle": (80.0, 100.0)}
    runs = [job(system, repeat, times[system][repeat]) for repeat in (0, 1) for system in times]
    return {"kind": "compare", "seed": 7, "bounds": BOUNDS, **PLACE, "runs": runs}


class _Page(HTMLParser):
    """What a browser would see: texts, and whether every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.images: list[str] = []
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.images.append(values["alt"] or "")
        self.loaded += [value for name in ("src", "href") if (value := values.get(name))]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def page_of(results: list[dict[str, Any]], path: Path) -> _Page:
    out = path / "report.html"
    write_report(results, out)
    page = _Page(out.read_text(encoding="utf-8"))
    assert page.open == []
    assert all(value.startswith("data:image/svg+xml;base64,") for value in page.loaded), "it needs nothing else"
    return page


def test_ratios_are_of_pairs() -> None:
    runs = read_runs([compared()])
    assert ratios(runs, "basic", "dualpath") == [2.0, 1.6]
    assert ratios(runs, "dualpath", "oracle") == [1.25, 1.5]
    assert ratios(runs, "basic", "tiered") == []


def test_runs_of_two_results_are_not_paired() -> None:
    apart = [{**PLACE, **job("basic", 0, 200.0)}, {**PLACE, **job("dualpath", 0, 100.0)}]
    assert ratios(read_runs(apart), "basic", "dualpath") == []


def test_repeats_that_are_not_numbered_are_paired_in_order() -> None:
    runs = [
        {"system": system, "job_s": job_s}
        for system, job_s in (("basic", 10.0), ("dualpath", 5.0), ("basic", 30.0), ("dualpath", 10.0))
    ]
    assert ratios(read_runs([{"runs": runs}]), "basic", "dualpath") == [2.0, 3.0]


def test_the_table_of_systems() -> None:
    header, [(name, rows)] = system_table(read_runs([compared()]))
    assert name == "ds-660b, 2P4D, 64 agents, MAL 65,536"
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(table) == ["basic", "dualpath", "oracle"]
    dualpath = table["dualpath"]
    assert dualpath["JCT (s)"] == "125 (100–150)"
    assert dualpath["Basic / system"] == "1.80 (1.60–2.00)"
    assert dualpath["system / Oracle"] == "1.38 (1.25–1.50)"
    assert dualpath["JCT / bound"] == "1.56 (1.25–1.88)", "125 s, 100 s and 150 s over 80 s"
    assert dualpath["bound by"] == "prefill compute"
    assert table["basic"]["formula's bound (s)"] == "180"
    assert "TTFT p50 (s)" not in header, "nobody measured it"


def test_one_measure_of_completion_in_a_comparison() -> None:
    runs = [job("basic", 0, 90.0, makespan_s=100.0), {"system": "dualpath", "repeat": 0, "makespan_s": 50.0}]
    assert ratios(read_runs([{"runs": runs}]), "basic", "dualpath") == [2.0], "not 90 s over 50 s"
    assert [run.job_s for run in read_runs([{"runs": runs[:1]}])] == [90.0]


def test_the_last_window_goes_before_the_run() -> None:
    verdict = {"stationary": False, "window_ttft_s": {"mean": 2.0}}
    told = {"system": "basic", "aps": 1.0, "ttft_ms": {"mean": 9.0}, "tpot_ms": {"mean": 30.0}, "verdict": verdict}
    [run] = read_runs([told])
    assert run.latency["ttft"] == {"mean": 2.0} and run.latency["tpot"] == {"mean": 0.03}
    assert run.doubtful and not run.broken


def test_native_lengths_go_without_saying() -> None:
    assert title([("append_scale", 1.0), ("generation_scale", 2.0), ("model", "ds-27b")]) == "ds-27b, generation ×2"


def test_milliseconds_are_seconds_in_the_table() -> None:
    summary = {"mean": 120.0, "p50": 1500.0, "p99": 2500.0, "n": 3}
    header, [(_, [row])] = system_table(read_runs([{"system": "basic", "ttft_ms": summary}]))
    assert dict(zip(header, row, strict=True)) == {
        "system": "basic",
        "runs": "1",
        "TTFT p50 (s)": "1.50",
        "TTFT p99 (s)": "2.50",
    }


def test_a_sweep_is_a_figure_of_its_axis_only() -> None:
    swept = {**PLACE, "kind": "sweep", "runs": [{**job("basic", 0, 10.0), "mal": mal} for mal in (32_768, 65_536)]}
    runs = read_runs([swept])
    assert sweep_figure(runs, "mal") is not None
    for axis in ("agents", "append_scale", "generation_scale", "nodes"):
        assert sweep_figure(runs, axis) is None
    assert sweep_figure(read_runs([compared()]), "agents") is not None, "a job that no sweep varies"


def test_bars_are_medians() -> None:
    figure = sweep_figure(read_runs([compared()]), "agents")
    assert figure is not None
    [panel] = figure.axes
    assert [round(bar.get_height(), 6) for bar in panel.patches] == [220.0, 125.0, 90.0]


def test_ablation_steps_are_against_basic() -> None:
    steps = {"basic": 100.0, "basic+layerwise": 80.0, "+dual": 62.0, "dualpath": 54.0}
    figure = ablation_figure(read_runs([{"runs": [job(system, 0, job_s) for system, job_s in steps.items()]}]))
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == ["", "-20 %", "-38 %", "-46 %"]
    assert ablation_figure(read_runs([compared()])) is None, "two systems of the chain are no steps"


@pytest.mark.parametrize(("ttft_s", "top"), [(0.1, 4.8), (60.0, 12.0)])
def test_an_objective_is_in_its_panel(ttft_s: float, top: float) -> None:
    told = [{"system": "basic", "aps": aps, "ttft_s": {"mean": ttft_s}, "slo": {"ttft_s": 4.0}} for aps in (1, 2)]
    figure = online_figure(read_runs([{"runs": told}]))
    assert isinstance(figure, Figure)
    panel = figure.axes[0]
    assert panel.get_ylabel() == "TTFT (s)" and panel.get_ylim() == pytest.approx((0, top))
    assert [text.get_text() for text in panel.texts] == ["SLO 4 s"]


def test_one_load_tells_for_a_cluster() -> None:
    loads = [(0.1, ("basic", "oracle")), (0.2, ("basic", "oracle")), (0.3, ("oracle",))]
    runs = read_runs(
        [{"runs": [{"system": s, "aps": aps, "ttft_s": {"mean": 1.0}} for aps, systems in loads for s in systems]}]
    )
    [(place, group)] = telling(runs)
    assert place == (("aps", 0.2),) and len(group) == 2


def test_flags() -> None:
    flags = {"a": True, "b": False, "c": {"ok": False, "detail": "why"}, "d": {"ok": True}, "e": None}
    assert broken_flags(flags) == ["b", "c: why"]
    assert broken_flags(None) == []


def test_broken_flags_are_on_top(tmp_path: Path) -> None:
    result = compared()
    result["validity"] = {"client_unsaturated": {"ok": False, "detail": "97 % busy"}}
    result["runs"][1]["validity"] = {"warm": False}
    text = page_of([result], tmp_path).text
    assert text.index("client_unsaturated: 97 % busy") < text.index("Systems")
    assert "dualpath, ds-660b" in text[: text.index("warm")]
    assert "All validity flags hold" in page_of([{**compared(), "validity": {"warm": True}}], tmp_path).text
    assert "carry no validity flags" in page_of([compared()], tmp_path).text


def test_the_figures_of_a_full_result(tmp_path: Path) -> None:
    series = {"mean": 1.1, "at_s": [1, 2, 3], "max_over_avg": [1.2, None, 1.0]}
    latency = {"mean": 0.1, "p50": 0.1, "p99": 0.2}
    offline = compared()
    offline["runs"][0] |= {"balance": {"snic": series, "attention": None}, "ttft_parts_s": {"read": 1.0}}
    online = {
        "kind": "online",
        **PLACE,
        "slo": {"ttft_s": 4.0, "tpot_s": 0.05},
        "ratios": {"aps_dualpath_over_basic": 2.25},
        "runs": [{"system": "basic", "aps": aps, "ttft_s": latency, "tpot_s": latency} for aps in (0.1, 0.2)],
    }
    page = page_of([offline, online], tmp_path)
    assert [re.search(r"Figures? \d+", alt)[0] for alt in page.images] == [  # type: ignore[index]
        "Figure 7",
        "Figures 10",
        "Figure 12",
        "Figures 13",
    ]
    assert "aps_dualpath_over_basic" in page.text and "2.25" in page.text
    assert "seed 7" in page.text


def test_what_a_run_comes_to_is_read() -> None:
    turn = TurnRecord(
        "a", 0, 10.0, 10.0, 18.0, 100, 2, [12.0, 16.0], parts={"read_s": 1.0, "prefill_s": 0.5}, cached_tokens=64
    )
    log = RunLog(1, 10.0, 18.0, 1, 10.0, turns=[turn], trajectories=[TrajectoryRecord("a", 10.0, 18.0, True)])
    told = outcome(log, Slo(), Witness([], 3, [], 0.5, {}, {"a": [64]}), factor=2.0)
    [run] = read_runs([{"system": "dualpath", "agents": 1, **told}])
    assert run.makespan_s == 4.0, "half of 8 s"
    assert [run.latency[of]["mean"] for of in ("ttft", "ttst", "tpot", "jct")] == [1.0, 2.0, 2.0, 4.0]
    assert run.parts_s == {"scheduling": 0.0, "allocation": 0.0, "read": 0.5, "prefill": 0.25}
    assert run.slo == {"ttft_s": 4.0, "tpot_s": 0.05}
    assert [flag.partition(":")[0] for flag in run.broken] == ["observed"]
    [online] = read_runs([{"system": "dualpath", "aps": 1.0, **told}])
    assert online.job_s is None, "a stream of agents is no job"


@pytest.mark.parametrize("result", [{"system": "dualpath", "job_s": 12.5}, {"jct_s": {"mean": 3.0}, "turns": 4}])
def test_a_lone_run_is_a_report(result: dict[str, Any], tmp_path: Path) -> None:
    assert result.get("system", "as served") in page_of([result], tmp_path).text


def test_what_a_result_says_is_text_not_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&'
    told = dict.fromkeys(("system", "model", "kind", "scale", "seed", "workload"), evil)
    maps = {"validity": {evil: False}, "ratios": {evil: 1.0}, "versions": {evil: evil}, "capacity": {evil: {}}}
    page = page_of([{**told, **maps, "job_s": 1.0}], tmp_path)
    assert "script" not in page.open and page.text.count(evil) >= 8


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    pages = []
    for _ in range(2):
        write_report([compared()], tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_capacity_and_what_is_behind_ratios(tmp_path: Path) -> None:
    result = compared() | {
        "ratios": {"jct_basic_over_dualpath": 1.8},
        "spreads": {"jct_basic_over_dualpath": [1.6, 2.0]},
        "bound_ratios": {"jct_basic_over_dualpath": 2.25},
        "capacity": {"basic": {"aps": 0.2, "failed_aps": None, "bound_aps": 0.55}},
    }
    text = page_of([result], tmp_path).text.split()
    ratio = text.index("jct_basic_over_dualpath")
    assert text[ratio : ratio + 5] == ["jct_basic_over_dualpath", "1.80", "1.60", "2.00", "2.25"]
    assert text[ratio - 5] == "compare,"  # and where: they stand in groups
    where = text.index("basic", text.index("Capacity"))
    assert text[where : where + 4] == ["basic", "0.200", "–", "0.550"]


def test_results_are_read_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no results"):
        read_results(tmp_path)
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(f'{{"kind": "{name}"}}')
    assert [result["kind"] for result in read_results(tmp_path)] == ["a", "b"]
    for content in ("[1]", "{"):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(ConfigError, match=r"c\.json"):
            read_results(tmp_path)


@pytest.mark.parametrize("results", [[], [{}], [{"runs": [{"system": "basic"}]}]])
def test_nothing_measured_is_refused(results: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no result holds a run"):
        write_report(results, tmp_path / "report.html")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writable directory"):
        write_report([compared()], tmp_path / "none" / "report.html")


def test_every_system_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(SYSTEMS)
    assert len({look.color for look in LOOKS.values()}) == len({look.marker for look in LOOKS.values()}) == len(LOOKS)


def test_only_a_report_plots() -> None:
    code = "import sys, loadgen.cli, loadgen.report.html; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
