"""`loadgen`: replay agent sessions against an OpenAI-compatible endpoint, or run experiments on clusters of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from common.errors import ConfigError
from common.workload.scaling import Selection, Workload
from common.workload.sessions import PACKAGED
from loadgen.experiments_cli import register
from loadgen.measure import Slo
from loadgen.online import online, schedule
from loadgen.progress import ProgressMode
from loadgen.replay import replay
from loadgen.report import print_report, write_result
from loadgen.run import Options, Plan, run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def _positive(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter("must be a number above 0")
    return value


Url = Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8000")]
SessionsFile = Annotated[Path, typer.Option(help="Sessions, as JSON lines", show_default="those of the package")]
MaxSessions = Annotated[int | None, typer.Option(min=1, help="Use the first N sessions only")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Use the first N turns of each session only")]
MaxContext = Annotated[int | None, typer.Option(min=2, help="Divide each session's lengths until it fits N tokens")]
Scale = Annotated[int | None, typer.Option(min=1, help="Divide all lengths by K")]
Think = Annotated[bool, typer.Option("--think", help="Keep the think times between turns")]
SloTtft = Annotated[float, typer.Option(callback=_positive, help="Objective for TTFT, in seconds")]
SloTpot = Annotated[float, typer.Option(callback=_positive, help="Objective for TPOT, in seconds")]
Out = Annotated[Path | None, typer.Option(help="Write the result here, as JSON", dir_okay=False, writable=True)]
TranscriptFile = Annotated[Path | None, typer.Option(help="Write every turn's token ids here, as JSON lines")]
Show = Annotated[ProgressMode, typer.Option(help="On stderr: a bar on a terminal, or a JSON line a turn, or nothing")]


@app.command("replay")
def replay_command(
    url: Url,
    sessions: SessionsFile = PACKAGED,
    agents: Annotated[int, typer.Option(min=1, help="How many sessions are played at a time")] = 4,
    max_sessions: MaxSessions = None,
    max_turns: MaxTurns = None,
    max_context: MaxContext = None,
    scale: Scale = None,
    think: Think = False,
    slo_ttft: SloTtft = 4.0,
    slo_tpot: SloTpot = 0.05,
    out: Out = None,
    transcript: TranscriptFile = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Closed loop: N agents play every session once."""

    def plan(workload: Workload) -> Plan:
        return Plan(
            {"mode": "replay", "agents": agents},
            workload.num_turns,
            min(agents, len(workload.trajectories)),
            lambda agent: replay(agent, workload.trajectories, agents),
        )

    selection = Selection(max_sessions, max_turns, max_context, scale)
    _execute(Options(url, sessions, selection, Slo(slo_ttft, slo_tpot), think, transcript, progress), plan, out)


@app.command("online")
def online_command(
    url: Url,
    aps: Annotated[float, typer.Option(callback=_positive, help="Agents that arrive per second")],
    duration: Annotated[float, typer.Option(callback=_positive, help="Seconds during which agents arrive")],
    seed: Annotated[int, typer.Option(help="Decides arrivals, sessions and texts")] = 0,
    sessions: SessionsFile = PACKAGED,
    max_sessions: MaxSessions = None,
    max_turns: MaxTurns = None,
    max_context: MaxContext = None,
    scale: Scale = None,
    think: Think = False,
    slo_ttft: SloTtft = 4.0,
    slo_tpot: SloTpot = 0.05,
    out: Out = None,
    transcript: TranscriptFile = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Open loop: agents arrive as a Poisson process, each plays a session drawn at random."""

    def plan(workload: Workload) -> Plan:
        arrivals = schedule(workload.trajectories, aps, duration, seed)
        return Plan(
            {"mode": "online", "aps": aps, "duration_s": duration, "seed": seed, "arrivals": len(arrivals)},
            sum(len(arrival.trajectory.turns) for arrival in arrivals),
            len(arrivals),
            lambda agent: online(agent, arrivals),
        )

    selection = Selection(max_sessions, max_turns, max_context, scale)
    _execute(Options(url, sessions, selection, Slo(slo_ttft, slo_tpot), think, transcript, progress), plan, out)


register(app)


def _execute(options: Options, plan: Callable[[Workload], Plan], out: Path | None) -> None:
    """Run, print, write. Exit status: 0, 1 if no turn ended well, 2 if it could not start, 130 if interrupted."""
    try:
        if out is not None and not out.absolute().parent.is_dir():
            raise ConfigError(f"result file {out}: no such directory: create {out.parent} first")
        result = uvloop.run(run(options, plan))
        print_report(result, Console())
        if out is not None:
            write_result(result, out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted before the first turn", file=sys.stderr)
        raise typer.Exit(130) from None
    if result["interrupted"]:
        raise typer.Exit(130)
    if not result["turns"]:
        print("error: no turn ended well", file=sys.stderr)
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    app(prog_name="loadgen")
