"""What an experiment says to people: a row a run, the ratios beside the formula's, what is not as it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.report import number


def print_runs(result: Mapping[str, Any], console: Console) -> None:
    """All runs of a result. Times are the real cluster's."""
    runs = result["runs"]
    online = any("aps" in run for run in runs)
    table = Table(title=f"Runs: {result['scale']}", title_justify="left")
    measures = ("JCT s", "bound s", "makespan s", "turns/s", "TTFT p50 s", "p99", "TTST ms", "TPOT ms")
    for name in ("system", "load", *measures):
        table.add_column(name, justify="left" if name in ("system", "load") else "right")
    table.add_column("SNIC max/avg", justify="right")
    table.add_column("attention", justify="right")
    if online:
        table.add_column("objectives")
    table.add_column("not as it should be")
    for run in runs:
        table.add_row(*_row(run, online))
    table.caption = f"{result['workload']}; hits {result['hits']}"
    console.print(table)


def _row(run: Mapping[str, Any], online: bool) -> list[str]:
    cells = [
        run["system"],
        f"{run['aps']:.3g} agents/s" if "aps" in run else f"{run['nodes']}, {run['agents']} agents",
        "-" if "aps" in run else number(run["job_s"]),
        number(run["bounds"]["systems"][run["bound_as"]].get("job_completion_s")),
        number(run["makespan_s"]),
        number(run["turns_per_s"]),
        *(number(_seconds(run["ttft_ms"][statistic])) for statistic in ("p50", "p99")),
        *(number(run[measure]["mean"]) for measure in ("ttst_ms", "tpot_ms")),
        *(number(run["balance"][kind]["mean"] if run["balance"][kind] else None) for kind in ("snic", "attention")),
    ]
    if online:
        cells.append("met" if run["verdict"]["met"] else "missed" if run["verdict"]["stationary"] else "not stationary")
    return [*cells, "; ".join(flag["detail"] for flag in run["validity"].values() if not flag["ok"])]


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
