"""`loadgen paper WHAT`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from common.results import check_result_file
from loadgen.conduct import errors, stdout_console
from loadgen.experiments.options import Out, Seed, one_of
from loadgen.experiments.setting import versions
from loadgen.paper.calibration import CALIBRATIONS
from loadgen.paper.cases import FULL, QUICK, OnProgress, Runner
from loadgen.paper.exhibit import Exhibit, ratios
from loadgen.paper.exhibits import CALIBRATE, EXHIBITS
from loadgen.paper.tables import print_calibration, print_exhibit, print_heldout
from loadgen.report.text import write_result

ALL = "all"


def register(app: typer.Typer) -> None:
    app.command("paper")(paper)


def paper(
    what: Annotated[str, typer.Argument(help=f"{', '.join((*EXHIBITS, *CALIBRATE))} or {ALL}", metavar="WHAT")],
    quick: Annotated[bool, typer.Option("--quick", help="Shorter runs: all of them in under 10 minutes")] = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Tables and figures of the paper out of the simulator: ours beside the published number where there is one."""
    console = stdout_console()
    with errors():
        check_result_file(out)
        one_of("WHAT", what, (*EXHIBITS, *CALIBRATE, ALL))
        with _shown() as on_progress:
            runner = Runner(QUICK if quick else FULL, seed, on_progress)
            started, cpu_before = time.perf_counter(), time.process_time()
            exhibits = []
            for name in EXHIBITS if what == ALL else [what]:
                exhibits.append((EXHIBITS | CALIBRATE)[name](runner))
                print_exhibit(exhibits[-1], console)
            cost = Cost(time.process_time() - cpu_before, time.perf_counter() - started)
        if runner.results:
            print_calibration(console)
            console.print(runner.size.statement, highlight=False)
        print_heldout(exhibits, console)
        console.print(f"took {cost.cpu_s:.0f} s of CPU time, {cost.wall_s:.0f} s by the clock", highlight=False)
        if out is not None:
            write_result(_result(what, exhibits, runner, cost), out)


class Cost(NamedTuple):
    """Of all simulations: CPU time, which does not depend on who else uses the machine, and wall time; seconds."""

    cpu_s: float
    wall_s: float


def _result(what: str, exhibits: list[Exhibit], runner: Runner, cost: Cost) -> dict[str, Any]:
    runs = {id(run): run for exhibit in exhibits for run in exhibit.runs}
    return {
        "kind": "paper",
        "what": what,
        "seed": runner.seed,
        "workload": runner.size.statement,
        "calibration": {name: calibration.describe() for name, calibration in CALIBRATIONS.items()},
        "exhibits": [exhibit.describe() for exhibit in exhibits],
        "ratios": ratios(exhibits),
        "runs": list(runs.values()),
        **cost._asdict(),
        "versions": versions(),
    }


@contextmanager
def _shown() -> Iterator[OnProgress]:
    """A bar for the run at hand on a terminal; elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda title, done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda title, done: bar.update(task, description=title, completed=done)
