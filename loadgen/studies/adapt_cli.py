"""`loadgen adapt`: roles of nodes that follow the load, against fixed ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from common.perf.models import MODELS
from common.results import check_result_file
from loadgen.conduct import errors, stdout_console
from loadgen.experiments.options import Out, Quick, Seed, Show, one_of
from loadgen.experiments.setting import versions
from loadgen.progress import ProgressMode
from loadgen.report.tables import print_ratios
from loadgen.report.text import number, write_result
from loadgen.studies.adapt import CASES, Experiment, Run, job_s, ratios, spreads, ttft_p99_s
from loadgen.studies.simulate_cli import shown


def register(app: typer.Typer) -> None:
    app.command("adapt")(command)


def command(
    nodes: Annotated[int, typer.Option(min=1, help="In all; adapting starts at about 1 prefill to 2 decode")] = 9,
    gpus: Annotated[int, typer.Option(min=1, max=8, help="GPUs in use of each node, with their share of its NICs")] = 1,
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "ds-660b",
    case: Annotated[list[str] | None, typer.Option(help="; ".join(f"{n}: {t}" for n, t in CASES.items()))] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Loads of each case", show_default="3")] = None,
    switch_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds from an empty node to the other role", show_default="its weights' reload"),
    ] = None,
    seed: Seed = 0,
    quick: Quick = False,
    out: Out = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Nodes that change their role while they serve against every fixed ratio of prefill to decode nodes, simulated."""
    with errors():
        check_result_file(out)
        cases = [one_of("--case", name, CASES) for name in dict.fromkeys(case or CASES)]
        experiment = Experiment(
            MODELS[one_of("--model", model, MODELS)],
            nodes,
            gpus,
            turns=16,
            rollout=48 if quick else None,
            duration_s=600.0 if quick else 1800.0,
            rounds=rounds or (1 if quick else 3),
            switch_s=switch_s,
            seed=seed,
        )
        runs: list[Run] = []
        early = ""
        try:
            with shown(progress) as begin:
                experiment.play(cases, begin, runs.append)
        except KeyboardInterrupt:
            early = "interrupted"
        if runs:
            result = conclude(experiment, runs)
            _print(result, stdout_console())
            if out is not None:
                write_result({**result, **({"ended_early": early} if early else {})}, out)
        if early:
            raise KeyboardInterrupt


def conclude(experiment: Experiment, runs: list[Run]) -> dict[str, Any]:
    """Of the runs that there are."""
    found = spreads(runs, experiment.start.name)
    share = f"{experiment.gpus} of a node's {experiment.start.hardware.gpus} GPUs"
    return {
        "kind": "adapt",
        "config": {**asdict(experiment), "start": experiment.start.name},
        "seed": experiment.seed,
        "scale": f"simulated on a virtual clock: {experiment.nodes} nodes, {share}",
        "workload": "; ".join(f"{name}: {CASES[name]}" for name in dict.fromkeys(run["case"] for run in runs)),
        "controller": next((run["roles"]["controller"] for run in runs if run["adaptive"]), None),
        "versions": versions(),
        "runs": runs,
        "spreads": found,
        "ratios": ratios(found),
    }


def _print(result: dict[str, Any], to: Console) -> None:
    for case in dict.fromkeys(run["case"] for run in result["runs"]):
        to.print(_table(case, [run for run in result["runs"] if run["case"] == case]))
    print_ratios(result, to)
    to.print(f"{result['scale']}; the controller is the same in every case: {result['controller']}", highlight=False)


def _table(case: str, runs: Sequence[Run]) -> Table:
    """A row for each ratio: medians over rounds."""
    table = Table(title=f"{case}: {CASES[case]}", title_justify="left")
    table.add_column("nodes", no_wrap=True)
    for name in ("JCT s", "TTFT p50 s", "TTFT p99 s", "TPOT ms", "turns", "not well", "switches", "node-s away"):
        table.add_column(name, justify="right")
    for nodes in dict.fromkeys(run["nodes"] for run in runs):
        here = [run for run in runs if run["nodes"] == nodes]
        roles = [run["roles"] for run in here if run["adaptive"]]
        table.add_row(
            nodes,
            number(median(job_s(run) for run in here)),
            number(median(run["ttft_ms"]["p50"] for run in here) / 1e3),
            number(median(ttft_p99_s(run) for run in here)),
            number(median(run["tpot_ms"]["mean"] for run in here)),
            f"{median(run['turns'] for run in here):,.0f}",
            str(sum(run["offered"] - run["turns"] for run in here)),
            number(median(told["count"] for told in roles)) if roles else "",
            number(median(told["node_s"] for told in roles)) if roles else "",
        )
    return table
