"""`loadgen offline | compare | ablate | sweep`, online without a server, and `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import ConfigError
from compose.fabric import parse_shape
from loadgen.conduct import Run, conduct, errors
from loadgen.experiments import jobs, rates
from loadgen.experiments.options import (
    Agents,
    AppendScale,
    FromStart,
    GenerationScale,
    LookUp,
    Model,
    Out,
    Paced,
    Pacing,
    Quick,
    RealSessions,
    Rounds,
    Seed,
    Set,
    Shape,
    Show,
    Systems,
    TimeFactor,
    ToolTime,
    Turns,
    Whole,
    Windows,
)
from loadgen.experiments.setting import Setting
from loadgen.experiments.sizes import FULL, QUICK, Axis, Size, varied
from loadgen.progress import OnRun, ProgressMode
from loadgen.systems import CHAIN, SYSTEMS
from loadgen.workload.source import Source, chosen

QUICK_SYSTEMS = ("basic", "dualpath", "oracle")

Point = tuple[Setting, Size]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("offline")(
        _job_command("offline", ("dualpath",), 1, "N agents start at once: job completion time of one or more systems.")
    )
    app.command("compare")(
        _job_command(
            "compare", tuple(SYSTEMS), None, "The same jobs by several systems, in paired, interleaved rounds: ratios."
        )
    )
    app.command("ablate")(_job_command("ablate", CHAIN, None, "What each step from basic to dualpath brings."))
    app.command("sweep")(sweep)
    app.command("report")(report)


def _job_command(kind: str, systems: Sequence[str], rounds: int | None, text: str) -> Callable[..., None]:
    """A command that runs jobs, of these systems where none are named; rounds: by default."""

    def command(
        system: Systems = None,
        fabric: Shape = "2P4D",
        model: Model = "ds-660b",
        set_name: Set = None,
        sessions: RealSessions = None,
        gaps: ToolTime = "off",
        agents: Agents = None,
        windows: Windows = None,
        turns: Turns = None,
        from_start: FromStart = False,
        rounds: Rounds = rounds,
        time_factor: TimeFactor = None,
        seed: Seed = 0,
        look_up: LookUp = False,
        whole: Whole = False,
        pacing: Paced = Pacing.AUTO,
        append_scale: AppendScale = 1.0,
        generation_scale: GenerationScale = 1.0,
        quick: Quick = False,
        out: Out = None,
        progress: Show = ProgressMode.AUTO,
    ) -> None:
        size = (QUICK if quick else FULL).given(agents, windows, turns, rounds)
        with errors():
            source = chosen(set_name, sessions, gaps, append_scale, generation_scale)
            setting = make_setting(fabric, model, source, size.turns, time_factor, seed, not look_up, from_start)
            named = known(system or (QUICK_SYSTEMS if quick and len(systems) > len(QUICK_SYSTEMS) else systems))
        _jobs(kind, [(setting, size)], named, whole, pacing, out, progress)

    command.__doc__ = text
    return command


def sweep(
    axis: Annotated[Axis, typer.Argument(help="What to vary")],
    values: Annotated[str, typer.Argument(help="Its values, with commas: 32,64,128; 32K,64K; 0.5,1,2; 1P1D,2P1D")],
    system: Systems = None,
    fabric: Shape = "2P4D",
    model: Model = "ds-660b",
    set_name: Set = None,
    sessions: RealSessions = None,
    gaps: ToolTime = "off",
    agents: Agents = None,
    windows: Windows = None,
    turns: Turns = None,
    rounds: Rounds = None,
    time_factor: TimeFactor = None,
    seed: Seed = 0,
    pacing: Paced = Pacing.AUTO,
    quick: Quick = False,
    out: Out = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Compare at several values of one thing."""
    size = (QUICK if quick else FULL).given(agents, windows, turns, rounds)
    with errors():
        setting = make_setting(fabric, model, chosen(set_name, sessions, gaps), size.turns, time_factor, seed)
        points = [varied(setting, size, axis, value.strip()) for value in values.split(",")]
        named = known(system or QUICK_SYSTEMS)
    _jobs("sweep", points, named, False, pacing, out, progress)


def run_online(
    systems: Sequence[str],
    setting: Setting,
    aps: Sequence[float],
    window: rates.Window,
    tolerance: float,
    trials: int,
    pacing: Pacing,
    out: Path | None,
    progress: ProgressMode,
) -> None:
    """Systems at rates, or, where none are given, the largest that each serves within the objectives."""

    async def play(on_run: OnRun, add: Callable[[Run], None]) -> None:
        if aps:
            await rates.at_rates(setting, systems, aps, window, pacing.namespaces, on_run, add)
        else:
            await rates.search(setting, systems, window, tolerance, trials, pacing.namespaces, on_run, add)

    def conclude(runs: list[Run]) -> dict[str, Any]:
        found = rates.capacities(setting, runs)
        return {
            **setting.describe(runs[0]["placement"]),
            "arrivals": window.describe(),
            "runs": runs,
            "capacity": found,
            "ratios": rates.capacity_ratios(found),
            "bound_ratios": rates.bound_ratios(found),
        }

    conduct("online", play, conclude, out, progress)


def report(
    directory: Annotated[Path, typer.Argument(help="With results (*.json)", exists=True, file_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The page", show_default="report.html in the directory")] = None,
) -> None:
    """One HTML page with plots out of result files."""
    from loadgen.report.html import read_results, write_report

    target = out or directory / "report.html"
    with errors():
        write_report(read_results(directory), target)
    print(target)


def make_setting(
    fabric: str,
    model: str,
    source: Source,
    turns: int,
    time_factor: float | None,
    seed: int,
    know_hits: bool = True,
    from_start: bool = False,
) -> Setting:
    """ConfigError for a shape, model or workload that is none."""
    prefill, decode = parse_shape(fabric)
    setting = Setting(
        model=model,
        prefill=prefill,
        decode=decode,
        workload=source,
        turns=turns,
        know_hits=know_hits,
        seed=seed,
        from_start=from_start,
    )
    return replace(setting, time_factor=time_factor or setting.easy_time_factor)


def known(systems: Sequence[str]) -> list[str]:
    """The systems, each once. ConfigError for one that is not in the table."""
    for system in systems:
        if system not in SYSTEMS:
            raise ConfigError(f"--system {system!r} is unknown: one of {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(systems))


def _jobs(
    kind: str,
    points: Sequence[Point],
    systems: Sequence[str],
    whole: bool,
    pacing: Pacing,
    out: Path | None,
    progress: ProgressMode,
) -> None:
    async def play(on_run: OnRun, add: Callable[[Run], None]) -> None:
        for index, (setting, size) in enumerate(points):

            def add_here(run: Run, index: int = index) -> None:
                add({"point": index, **run})

            await jobs.compare(
                setting, systems, size.agents, size.windows, size.rounds, whole, pacing.namespaces, on_run, add_here
            )

    def conclude(runs: list[Run]) -> dict[str, Any]:
        parts = []
        for index, (setting, size) in enumerate(points):
            if here := [run for run in runs if run["point"] == index]:
                parts.append(
                    {
                        **setting.place(),
                        "agents": size.agents,
                        "ratios": jobs.ratios(here),
                        "spreads": jobs.spreads(here),
                        "bound_ratios": jobs.bound_ratios(setting, here, size.agents, size.windows),
                    }
                )
        head = points[0][0].describe(runs[0]["placement"])
        return {**head, "runs": runs, **(parts[0] if len(points) == 1 else {"points": parts, "ratios": {}})}

    conduct(kind, play, conclude, out, progress)
