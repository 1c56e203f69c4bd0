"""`dualpath plan`: asks the load generator's planner, and shows what it answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from services.launcher.tools import last_json, run_tool

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


async def run_plan(arguments: list[str], progress: Progress) -> dict[str, Any]:
    """The plan (loadgen.plan.planner.make_plan). ConfigError for what cannot be, with the nearest value."""
    task = progress.add_task("simulated shapes", total=None)

    def show(line: str) -> None:
        if line.startswith('{"done"'):
            row = json.loads(line)
            progress.update(task, completed=row["done"], total=row["total"])

    output = await run_tool("loadgen", "plan", *arguments, on_line=show)
    told: dict[str, Any] = json.loads(last_json(output))
    return told


def plan_table(plan: dict[str, Any]) -> Table:
    """One row a shape that was simulated."""
    from rich.table import Table

    asked, best = plan["asked"], plan["best"]
    title = f"{asked['model']}, {asked['workload']}, {asked['aps']:g} agents/s, {asked['system']}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("nodes", no_wrap=True)
    for name in ("P/D", "fullest %", "JCT s", "TTFT s", "p99 s", "TPOT ms"):
        shown.add_column(name, justify="right")
    shown.add_column("fullest resource", no_wrap=True)
    shown.add_column("objectives", no_wrap=True)
    for run in plan["tried"]:
        is_best = best is not None and run["shape"] == best["shape"]
        shown.add_row(
            run["shape"] + (" *" if is_best else ""),
            f"{run['prefill_nodes'] / run['decode_nodes']:.2f}",
            f"{100 * run['fullest']:.0f}",
            _number(run["trajectory_s"]),
            _number(run["ttft_s"]),
            _number(run["ttft_p99_s"]),
            _number(run["tpot_s"] and 1e3 * run["tpot_s"]),
            run["binds"],
            "met" if run["met"] else "missed" if run["stationary"] else "not stationary",
        )
    return shown


def findings(plan: dict[str, Any]) -> list[str]:
    """What the table does not say: the answer, the range, the demand, memory."""
    return [_answer(plan), *_parts(plan), _range(plan["range"]), _demand(plan), *_memory(plan)]


def _answer(plan: dict[str, Any]) -> str:
    best, slo = plan["best"], plan["asked"]["slo"]
    objectives = f"TTFT <= {slo['ttft_s']:g} s and TPOT <= {1e3 * slo['tpot_s']:g} ms in the mean"
    if best is None:
        run = plan["tried"][0]
        return f"{run['shape']} does not meet {objectives}: {run['binds']} binds"
    return (
        f"best: {best['shape']}, {best['nodes']} nodes, with {objectives}; the first to bind is {best['binds']}"
        f" ({100 * best['fullest']:.0f} % in use)"
    )


def _parts(plan: dict[str, Any]) -> list[str]:
    if plan["parts"] == 1:
        return []
    return [f"taken to be {plan['parts']} equal clusters, of which one was simulated with its share of the load"]


def _range(told: dict[str, Any]) -> str:
    if told["least"] is None:
        return f"no ratio of prefill to decode nodes is free of bottlenecks: {told['greatest_by']}, {told['least_by']}"
    return (
        f"bottleneck-free: {told['least']:.3g} <= P/D <= {told['greatest']:.3g}"
        f" (least: {told['least_by']}; greatest: {told['greatest_by']})"
    )


def _demand(plan: dict[str, Any]) -> str:
    told, turn = plan["demand"], plan["mean_turn"]
    return (
        f"demand: {_number(told['turns_per_s'])} turns/s (mean turn: {turn['hit']:,} tokens hit, {turn['miss']:,}"
        f" computed, {turn['generated']:,} generated); reads {_number(told['read_bytes_per_s'] / 1e9)} GB/s,"
        f" writes {_number(told['written_bytes_per_s'] / 1e9)} GB/s"
    )


def _memory(plan: dict[str, Any]) -> list[str]:
    told = plan["memory"]
    return [
        f"working set: {told['working_set_bytes'] / 1e9:,.0f} GB of KV of active agents (tool time that stretches JCT"
        " k times makes it k times as large at the same rate)",
        f"staging DRAM: {_number(told['staging_bytes'] / 1e9)} GB in use of {told['staging_limit_bytes'] / 1e9:,.0f}"
        f" GB; storage grows by {_number(told['stored_a_day_bytes'] / 1e12)} TB a day where nothing is evicted",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
