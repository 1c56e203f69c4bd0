"""Conducting an experiment from a command: run, tell, write, also what there is of one that ended early."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.console import Console

from common.errors import ConfigError
from common.results import check_result_file
from loadgen.progress import OnRun, ProgressMode, runs_progress
from loadgen.report.tables import print_capacity, print_ratios, print_runs
from loadgen.report.text import write_result

PIPE_WIDTH = 160

Run = dict[str, Any]
Play = Callable[[OnRun, Callable[[Run], None]], Coroutine[Any, Any, None]]
"""Plays all runs: tells of each that starts, and hands over what came of it."""
Conclude = Callable[[list[Run]], dict[str, Any]]
"""What runs come to."""


def conduct(kind: str, play: Play, conclude: Conclude, out: Path | None, progress: ProgressMode) -> None:
    """Exit status: 0, 2 if it could not be run to its end, 130 if interrupted. What was measured by then is told."""
    runs: list[Run] = []
    early = ""
    with errors():
        check_result_file(out)
        try:
            with runs_progress(progress) as on_run:
                if uvloop.run(_interrupted(play(on_run, runs.append))):
                    raise KeyboardInterrupt
        except (ConfigError, KeyboardInterrupt) as error:
            early = str(error) or "interrupted"
            raise
        finally:
            if runs:
                _tell({"kind": kind, **({"ended_early": early} if early else {}), **conclude(runs)}, out)


async def _interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Run work to its end, or until SIGINT or SIGTERM, which cancels it: True then, once its clusters are gone."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if task.cancelled():
        return True
    task.result()
    return False


def stdout_console() -> Console:
    """Tables are not squeezed into 80 columns where there is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def _tell(result: dict[str, Any], out: Path | None) -> None:
    console = stdout_console()
    print_runs(result, console)
    if "capacity" in result:
        print_capacity(result, console)
    for point in result.get("points", [result]):
        print_ratios(point, console)
    if out is not None:
        write_result(result, out)


@contextmanager
def errors() -> Iterator[None]:
    """What is wrong with the input, or with the cluster, in one line; an interrupt without a traceback."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
