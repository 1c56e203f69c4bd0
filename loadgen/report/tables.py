"""What an experiment says to people: a row a run, the ratios beside the formula's, what is not as it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.report.text import number


def print_runs(result: Mapping[str, Any], console: Console) -> None:
    """All runs of a result. Times are the real cluster's."""
    runs = result["runs"]
    online = any("aps" in run for run in runs)
    table = Table(title="Runs, in the real cluster's time", title_justify="left")
    table.add_column("system", no_wrap=True)
    table.add_column("load", no_wrap=True)
    measures = ("JCT s", "bound s", "makespan s") if not online else ()
    for name in (*measures, "turns/s", "TTFT p50 s", "p99 s", "TTST ms", "TPOT ms", "SNIC max/avg", "attention"):
        table.add_column(name, justify="right")
    if online:
        table.add_column("objectives", no_wrap=True)
    for run in runs:
        table.add_row(*_row(run, online))
    console.print(table)
    for line in (result["scale"], result["workload"], f"hits: {result['hits']}", *_broken(runs)):
        console.print(line, markup=False, highlight=False)


def _broken(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not as it should be."""
    return [
        f"{run['system']}, {_load(run)}: {name.replace('_', ' ')}: no ({flag['detail']})"
        for run in runs
        for name, flag in run["validity"].items()
        if not flag["ok"]
    ]


def _load(run: Mapping[str, Any]) -> str:
    if "aps" in run:
        return f"{run['nodes']}, {run['aps']:.3g} agents/s"
    return f"{run['nodes']}, {run['agents']} agents, round {run['repeat'] + 1}"


def _row(run: Mapping[str, Any], online: bool) -> list[str]:
    bound = run["bounds"]["systems"][run["bound_as"]].get("job_completion_s")
    job = [] if online else [number(run["job_s"]), number(bound), number(run["makespan_s"])]
    cells = [
        run["system"],
        _load(run),
        *job,
        number(run["turns_per_s"]),
        *(number(_seconds(run["ttft_ms"][statistic])) for statistic in ("p50", "p99")),
        *(number(run[measure]["mean"]) for measure in ("ttst_ms", "tpot_ms")),
        *(number((run["balance"][kind] or {}).get(of)) for kind, of in (("snic", "mean"), ("attention", "rounds"))),
    ]
    if online:
        cells.append("met" if run["verdict"]["met"] else "missed" if run["verdict"]["stationary"] else "not stationary")
    return cells


def print_ratios(result: Mapping[str, Any], console: Console) -> None:
    """The flat map, with the spread over rounds and what the formula alone would give."""
    table = Table(title="Ratios", title_justify="left")
    for name in ("ratio", "median", "least", "greatest", "by the formula"):
        table.add_column(name, justify="left" if name == "ratio" else "right")
    for name, value in result["ratios"].items():
        values: Sequence[float] = result.get("spreads", {}).get(name, ())
        least, greatest = (number(min(values)), number(max(values))) if values else ("", "")
        table.add_row(name, number(value), least, greatest, number(result.get("bound_ratios", {}).get(name)))
    console.print(table)


def print_capacity(result: Mapping[str, Any], console: Console) -> None:
    """The largest rates found."""
    table = Table(title="Capacity, agents a second", title_justify="left")
    for name in ("system", "met", "failed at", "bound", "TTFT mean s", "p50", "p95", "p99", "TPOT mean ms"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for system, told in result["capacity"].items():
        best = next((run for run in result["runs"] if run["system"] == system and run["aps"] == told["aps"]), None)
        ttft = best["verdict"]["window_ttft_s"] if best else {}
        table.add_row(
            system,
            *(number(told[name]) for name in ("aps", "failed_aps", "bound_aps")),
            *(number(ttft.get(statistic)) for statistic in ("mean", "p50", "p95", "p99")),
            number(1e3 * best["verdict"]["window_tpot_s"]["mean"] if best else None),
        )
    table.caption = result["runs"][0]["verdict"]["rule"] if result["runs"] else ""
    console.print(table)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
