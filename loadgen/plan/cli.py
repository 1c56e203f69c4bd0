"""`loadgen plan`: what `dualpath plan` runs. The plan goes to stdout as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from loadgen.conduct import errors
from loadgen.measures.turns import Slo
from loadgen.plan.rules import asked, machine


def register(app: typer.Typer) -> None:
    app.command("plan", hidden=True)(plan)


def plan(
    gpus_per_node: Annotated[int, typer.Option()],
    cnic: Annotated[str, typer.Option()],
    snic: Annotated[str, typer.Option()],
    dram: Annotated[str, typer.Option()],
    hardware: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
    workload: Annotated[str, typer.Option()],
    aps: Annotated[float, typer.Option()],
    system: Annotated[str, typer.Option()],
    slo_ttft: Annotated[float, typer.Option()] = 4.0,
    slo_tpot: Annotated[float, typer.Option()] = 0.05,
    nodes: Annotated[str | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Behind `dualpath plan`: JSON on stdout, a JSON line a simulation on stderr."""
    from loadgen.plan.planner import make_plan

    with errors():
        node = machine(hardware, gpus_per_node, cnic, snic, dram)
        wanted = asked(model, node, workload, aps, system, Slo(slo_ttft, slo_tpot), nodes)
        told = make_plan(wanted, seed, _on_progress)
    print(json.dumps(told, allow_nan=False))


def _on_progress(done: int, most: int) -> None:
    print(json.dumps({"done": done, "total": most}), file=sys.stderr, flush=True)
