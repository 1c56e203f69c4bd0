"""`loadgen bench`: benchmarks of parts."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from common.results import check_result_file
from loadgen.bench.iperf import iperf3_gib_per_s
from loadgen.bench.isolation_cli import isolation
from loadgen.bench.loops import measure_loops
from loadgen.bench.transport import described, measure_all
from loadgen.conduct import errors, stdout_console
from loadgen.experiments.options import Out
from loadgen.report.text import number, write_result

app = typer.Typer(no_args_is_help=True, help="Benchmarks of parts, against the plainest way to do the same.")


@app.callback()
def bench() -> None:
    """Keeps `transport` a command of its own."""


app.command("isolation")(isolation)


@app.command("transport")
def transport_command(
    rounds: Annotated[int, typer.Option(min=3, help="Rounds in which every way has its turn")] = 15,
    peer_python: Annotated[
        Path, typer.Option(help="The interpreter that has mooncake and nixl", show_default="this one")
    ] = Path(sys.executable),
    loops: Annotated[float, typer.Option(min=0, help="Seconds of a cluster under full load; 0: none")] = 30.0,
    out: Out = None,
) -> None:
    """Rates and CPU time of every hop of KV bytes, as ratios to a plain copy, memcpy, sendfile, Mooncake and NIXL."""
    console = stdout_console()
    with errors():
        check_result_file(out)
        result = asyncio.run(_measured(rounds, str(peer_python), loops))
        _print(result, console)
        if out is not None:
            write_result(result, out)


async def _measured(rounds: int, python: str, loops_s: float) -> dict[str, Any]:
    def told(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    result = described(await measure_all(rounds, python, told), rounds)
    result["iperf3_gib_per_s"] = await iperf3_gib_per_s()
    result["load_average"] = os.getloadavg()[0]
    if loops_s:
        told("event loops under full load")
        result["event_loops"] = await measure_loops(loops_s)
    return result


def _print(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Ways", title_justify="left")
    for name in ("pieces", "way", "GiB/s", "quartiles", "CPU s/GiB"):
        table.add_column(name, justify="right" if name in ("GiB/s", "quartiles") else "left", no_wrap=True)
    for size, ways in result["ways"].items():
        for way, told in ways.items():
            rate = told["gib_per_s"]
            cpu = ", ".join(f"{side} {seconds:.3f}" for side, seconds in told["cpu_s_per_gib"].items())
            table.add_row(size, way, number(rate["median"]), f"{number(rate['q1'])} - {number(rate['q3'])}", cpu)
    console.print(table)
    ratios = Table(title="Ratios of rates (_cpu: of CPU time a byte, theirs over ours)", title_justify="left")
    for name in ("ratio", "median", "quartiles", "best"):
        ratios.add_column(name, justify="left" if name == "ratio" else "right")
    for name, value in result["ratios"].items():
        spread = result["spreads"].get(name)
        quartiles, best = (f"{spread['q1']:.2f} - {spread['q3']:.2f}", f"{spread['best']:.2f}") if spread else ("", "")
        ratios.add_row(name, f"{value:.2f}", quartiles, best)
    console.print(ratios)
    if "event_loops" in result:
        _print_loops(result["event_loops"], console)
    scale = result["iperf3_gib_per_s"]
    lines = [f"iperf3, one stream: {number(scale)} GiB/s" if scale else "iperf3: not installed"]
    lines += [f"{peer}: not run ({reason})" for peer, reason in result["absent"].items()]
    for line in (*lines, result["method"]):
        console.print(line, markup=False, highlight=False)


def _print_loops(loops: dict[str, Any], console: Console) -> None:
    table = Table(title="Event loops: callbacks by CPU time of the thread, seconds", title_justify="left")
    table.add_column("role")
    bounds = [bound for bound in next(iter(loops["roles"].values())) if bound != "over_limit"]
    for bound in bounds:
        table.add_column("all" if bound == "+Inf" else f"<= {bound}", justify="right")
    table.add_column(f"> {loops['limit_s']:g}", justify="right")
    for role, told in loops["roles"].items():
        table.add_row(role, *(f"{told[bound]:,.0f}" for bound in (*bounds, "over_limit")))
    table.caption = loops["load"]
    console.print(table)
    for line in loops["slow"]:
        console.print(line, markup=False, highlight=False)
