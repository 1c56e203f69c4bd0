"""`loadgen`: replay agent sessions against an OpenAI-compatible endpoint, or run experiments on clusters of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from common.errors import ConfigError
from common.results import check_result_file
from common.workload.scaling import Selection, Workload
from common.workload.sessions import PACKAGED
from loadgen.bench.cli import app as bench
from loadgen.conduct import errors
from loadgen.experiments.cli import known, make_setting, register, run_online
from loadgen.experiments.options import (
    Burstiness,
    LookUp,
    MaxContext,
    MaxSessions,
    MaxTurns,
    Model,
    Out,
    Paced,
    Pacing,
    Quick,
    Scale,
    SessionsFile,
    Set,
    Shape,
    Show,
    SloTpot,
    SloTtft,
    Systems,
    Think,
    TimeFactor,
    ToolTime,
    TranscriptFile,
    Turns,
    positive,
)
from loadgen.experiments.rates import Window
from loadgen.experiments.sizes import FULL, QUICK
from loadgen.measures.turns import Slo
from loadgen.paper import cli as paper_cli
from loadgen.plan import cli as planner_cli
from loadgen.progress import ProgressMode
from loadgen.replay.closed_loop import replay
from loadgen.replay.open_loop import online, schedule
from loadgen.replay.run import Options, Plan, run
from loadgen.report.text import print_report, write_result
from loadgen.studies import adapt_cli, simulate_cli
from loadgen.workload.source import chosen

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


Url = Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8000")]


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
    url: Annotated[str | None, typer.Option(help="A server; without it clusters are started")] = None,
    aps: Annotated[
        list[float] | None, typer.Option(help="Agents that arrive per second; without --url, repeat or leave out")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds during which agents arrive")] = None,
    seed: Annotated[int, typer.Option(help="Decides arrivals, sessions and texts")] = 0,
    cv: Burstiness = 1.0,
    sessions: Annotated[
        Path | None,
        typer.Option(help="Sessions, as JSON lines", show_default="those of the package; without --url --set"),
    ] = None,
    max_sessions: MaxSessions = None,
    max_turns: MaxTurns = None,
    max_context: MaxContext = None,
    scale: Scale = None,
    think: Think = False,
    slo_ttft: SloTtft = 4.0,
    slo_tpot: SloTpot = 0.05,
    system: Systems = None,
    fabric: Shape = "2P4D",
    model: Model = "ds-660b",
    set_name: Set = None,
    gaps: ToolTime = "off",
    turns: Turns = None,
    tolerance: Annotated[float, typer.Option(callback=positive, help="Where a search ends, of the rate")] = 0.06,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Runs a system at most, in a search", show_default=str(FULL.trials))
    ] = None,
    time_factor: TimeFactor = None,
    look_up: LookUp = False,
    pacing: Paced = Pacing.AUTO,
    quick: Quick = False,
    out: Out = None,
    transcript: TranscriptFile = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Open loop: agents arrive as a Poisson process. With --url each plays a session drawn at random; without, systems
    are compared, and the largest rate within the objectives is searched for."""
    slo = Slo(slo_ttft, slo_tpot)
    rates = [positive(rate) for rate in aps or []]
    if url is None:
        size = (QUICK if quick else FULL).given(None, None, turns, None)
        with errors():
            source = chosen(set_name, sessions, gaps)
            setting = make_setting(fabric, model, source, size.turns, time_factor, seed, not look_up)
            systems = known(system or ("basic", "dualpath"))
        window = Window(positive(duration or size.duration_s), slo, cv)
        run_online(systems, setting, rates, window, tolerance, trials or size.trials, pacing, out, progress)
        return
    if len(rates) != 1 or duration is None:
        raise typer.BadParameter("--url needs one --aps and a --duration")
    (rate,), duration_s = rates, positive(duration)

    def plan(workload: Workload) -> Plan:
        arrivals = schedule(workload.trajectories, rate, duration_s, seed, cv)
        return Plan(
            {
                "mode": "online",
                "aps": rate,
                "cv": cv,
                "duration_s": duration_s,
                "seed": seed,
                "arrivals": len(arrivals),
            },
            sum(len(arrival.trajectory.turns) for arrival in arrivals),
            len(arrivals),
            lambda agent: online(agent, arrivals),
        )

    selection = Selection(max_sessions, max_turns, max_context, scale)
    _execute(Options(url, sessions or PACKAGED, selection, slo, think, transcript, progress), plan, out)


register(app)
app.add_typer(bench, name="bench")
planner_cli.register(app)
paper_cli.register(app)
simulate_cli.register(app)
adapt_cli.register(app)


def _execute(options: Options, plan: Callable[[Workload], Plan], out: Path | None) -> None:
    """Run, print, write. Exit status: 0, 1 if no turn ended well, 2 if it could not start, 130 if interrupted."""
    try:
        check_result_file(out)
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
