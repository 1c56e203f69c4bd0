"""The commands of `dualpath` for who operates a cluster: status, top, trace, config.

Each imports for itself what it needs besides: `dualpath up` has this module's options to show, and starts no later.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.clock import monotonic
from common.config import Config, load_config
from common.config_layers import parse_settings
from common.errors import ConfigError, DualPathError
from common.results import check_result_file
from services.launcher.console import ConfigFile, Settings, errors, execute, results, say, tell

if TYPE_CHECKING:
    from common.messages import Status

app = typer.Typer()


@app.command("status")
def status_command(config: ConfigFile = None) -> None:
    """Ask the scheduler who is there."""
    execute(_status(config))


async def _status(file: Path | None) -> int:
    from services.launcher.status import status_table

    results.print(status_table(await _ask(load_config(file))))
    return 0


async def _ask(config: Config) -> Status:
    from services.launcher.status import get_status

    try:
        return await get_status(config)
    except DualPathError as error:
        raise ConfigError(f"{error}: is a cluster up there? --config FILE names another scheduler") from None


@app.command("top")
def top_command(
    config: ConfigFile = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what one interval was like, and end")] = False,
) -> None:
    """Watch nodes, queues, NICs and read paths; Ctrl-C ends it."""
    execute(_top(config, interval, once))


async def _top(file: Path | None, interval: float, once: bool) -> int:
    from rich.live import Live

    from services.launcher import top

    config = load_config(file)
    before, since = await _ask(config), monotonic()
    with Live(console=results if once else errors, screen=not once, auto_refresh=False, transient=once) as live:
        while True:
            await asyncio.sleep(interval)
            now, at = await _ask(config), monotonic()
            shown = top.view(before, now, at - since)
            if once:
                break
            live.update(shown, refresh=True)
            before, since = now, at
    results.print(shown)
    return 0


@app.command("trace")
def trace_command(
    request: Annotated[str, typer.Argument(help="A request's id (X-Request-Id, or the answer's id)")] = "",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Of the traces", metavar="DIR", show_default="trace.dir")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write trace events for Perfetto or chrome://tracing here", metavar="FILE")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Show one request's way through the cluster; without a request, the latest ones."""
    execute(_trace(request, directory, out, config))


async def _trace(request: str, directory: Path | None, out: Path | None, file: Path | None) -> int:
    from common.tracing import read_spans
    from services.launcher import trace

    configured = load_config(file).trace.dir
    if directory is None and not configured:
        raise ConfigError("trace.dir is not set: name the directory of the traces with --dir")
    check_result_file(out)
    spans = read_spans(directory or Path(configured))
    if not request:
        results.print(trace.latest(spans))
        return 0
    found = trace.of_request(spans, request)
    results.print(trace.waterfall(found))
    if out is not None:
        out.write_text(json.dumps(trace.chrome_trace(found)) + "\n")
        say(f"open {out} in https://ui.perfetto.dev or chrome://tracing")
    return 0


@app.command("config")
def config_command(
    config: ConfigFile = None,
    check: Annotated[bool, typer.Option("--check", help="Say what is wrong, and where; exit status 2 if any")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the effective values and where each comes from")] = False,
    settings: Settings = None,
) -> None:
    """Check or show the configuration: the file, above it the environment, above that flags."""
    execute(_config(config, settings or [], show or not check))


async def _config(file: Path | None, settings: list[str], show: bool) -> int:
    from services.launcher import configuration

    values, layers, problems = configuration.check(file, parse_settings(settings))
    for problem in problems:
        say(f"error: {problem}")
    if values is None:
        return 2
    for line in configuration.effective(values, layers) if show else ["the configuration is good"]:
        tell(line)
    return 0
