"""How commands of `dualpath` talk to people: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.errors import ConfigError, DualPathError
from services.launcher import signals

PIPE_WIDTH = 160

results, errors = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH), Console(stderr=True)
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration (TOML)", metavar="FILE")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override one field of the configuration", metavar="FIELD=VALUE")
]


def say(line: str) -> None:
    """To whoever runs the command."""
    errors.print(line, markup=False, highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """A line of the result, as it is."""
    results.print(line, markup=False, highlight=False, soft_wrap=True)


def execute(main: Coroutine[Any, Any, int]) -> None:
    """Run to the end or to a signal; exit with its status, after one clear line for what the user can mend."""
    try:
        status = signals.run(main)
    except (ConfigError, DualPathError) as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    raise typer.Exit(status)
