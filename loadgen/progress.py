"""Progress on stderr: a bar for people, one JSON line a turn for a parent process, or nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.measures.turns import TurnRecord


class ProgressMode(StrEnum):
    """auto: a bar if stderr is a terminal."""

    AUTO = "auto"
    JSON = "json"
    NONE = "none"


OnTurn = Callable[[TurnRecord], None]
OnRun = Callable[[str, int], OnTurn]
"""Told of a run that starts, by its title and number of turns; what it returns is told of each turn."""


@contextmanager
def progress(mode: ProgressMode, total: int) -> Iterator[OnTurn]:
    """A function to call with each turn that ended; total: turns that are to come."""
    if mode is ProgressMode.JSON:
        yield _json_lines(total)
    elif mode is ProgressMode.AUTO and sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("turns", total=total, last="")
            yield lambda record: bar.update(task, advance=1, last=_describe(record))
    else:
        yield lambda record: None


@contextmanager
def runs_progress(mode: ProgressMode) -> Iterator[OnRun]:
    """For an experiment of many runs: a bar for each, as they come."""
    if mode is ProgressMode.JSON:
        yield lambda title, total: _json_lines(total, {"run": title})
    elif mode is ProgressMode.AUTO and sys.stderr.isatty():
        with _bar() as bar:

            def start(title: str, total: int) -> OnTurn:
                task = bar.add_task(title, total=total, last="")
                return lambda record: bar.update(task, advance=1, last=_describe(record))

            yield start
    else:
        yield lambda title, total: lambda record: None


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=Console(stderr=True),
    )


def _describe(record: TurnRecord) -> str:
    if record.ttft is None or record.failure is not None:
        return f"{record.session} turn {record.turn}: {record.failure}"
    return f"{record.session} turn {record.turn}: TTFT {record.ttft * 1e3:.0f} ms"


def _json_lines(total: int, also: dict[str, str] | None = None) -> OnTurn:
    done = 0

    def line(record: TurnRecord) -> None:
        nonlocal done
        done += 1
        row = {
            **(also or {}),
            "done": done,
            "total": total,
            "session": record.session,
            "turn": record.turn,
            "prompt_tokens": record.prompt_tokens,
            "hit_tokens": record.cached_tokens,
            "generated_tokens": len(record.times),
            "ttft_ms": None if record.ttft is None else round(record.ttft * 1e3, 3),
            "failure": record.failure,
        }
        print(json.dumps(row), file=sys.stderr, flush=True)

    return line
