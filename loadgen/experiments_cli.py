"""`loadgen offline | compare | ablate | sweep | capacity | report`: experiments that start their own clusters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from common.errors import ConfigError
from loadgen.experiment import Setting
from loadgen.jobs import bound_ratios, compare, ratios, spreads
from loadgen.measure import Slo
from loadgen.progress import OnRun, ProgressMode, runs_progress
from loadgen.rates import Window, at_rates, capacities, capacity_ratios
from loadgen.report import write_result
from loadgen.systems import CHAIN, SYSTEMS
from loadgen.tables import print_capacity, print_ratios, print_runs

PIPE_WIDTH = 160
QUICK_SYSTEMS = ("basic", "dualpath", "oracle")


class Pacing(StrEnum):
    """What gives NICs their rates."""

    AUTO = "auto"          # the kernel where that can be had, else user space
    KERNEL = "kernel"
    USER = "user"

    @property
    def namespaces(self) -> bool | None:
        return {Pacing.AUTO: None, Pacing.KERNEL: True, Pacing.USER: False}[self]


class Axis(StrEnum):
    """What a sweep varies."""

    AGENTS = "agents"
    MAL = "mal"
    APPEND = "append"
    GENERATION = "generation"
    NODES = "nodes"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. --quick takes QUICK."""

    agents: int
    windows: int
    turns: int
    rounds: int
    duration_s: float


FULL = Size(agents=128, windows=320, turns=4, rounds=3, duration_s=60.0)
QUICK = Size(agents=48, windows=96, turns=3, rounds=1, duration_s=20.0)

Systems = Annotated[
    list[str] | None,
    typer.Option("--system", help=f"Repeat for several: {', '.join(SYSTEMS)}", show_default="all of them"),
]
Shape = Annotated[str, typer.Option(help="Nodes: xPyD for x prefill and y decode nodes")]
Model = Annotated[str, typer.Option(help="ds-660b, ds-27b or qwen-32b")]
Set = Annotated[str, typer.Option("--set", help="Trajectories like those of the paper's set 32K, 48K or 64K")]
Agents = Annotated[int | None, typer.Option(min=1, help="Agents at a time", show_default=str(FULL.agents))]
Windows = Annotated[int | None, typer.Option(min=1, help="Windows that are played", show_default=str(FULL.windows))]
Turns = Annotated[int | None, typer.Option(min=1, help="Turns of a window", show_default=str(FULL.turns))]
Rounds = Annotated[int | None, typer.Option(min=1, help="Paired rounds", show_default=str(FULL.rounds))]
TimeFactor = Annotated[float, typer.Option(min=0.1, help="Times are stretched by this while running")]
Seed = Annotated[int, typer.Option(help="Decides windows and arrivals")]
LookUp = Annotated[bool, typer.Option("--look-up", help="Hits are looked up in the store, not given by the client")]
Whole = Annotated[bool, typer.Option("--whole", help="Run to the last agent's end, for the makespan")]
Paced = Annotated[Pacing, typer.Option(help="NIC rates by the kernel (namespaces, needs root) or in user space")]
AppendScale = Annotated[float, typer.Option(min=0.01, help="Appended lengths of the set times this")]
GenerationScale = Annotated[float, typer.Option(min=0.01, help="Generated lengths of the set times this")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run, under 10 minutes")]
Out = Annotated[Path | None, typer.Option(help="Write the result here, as JSON", dir_okay=False, writable=True)]
Show = Annotated[ProgressMode, typer.Option(help="On stderr: bars on a terminal, or a JSON line a turn, or nothing")]
SloTtft = Annotated[float, typer.Option(min=0.001, help="Objective for TTFT, in seconds")]
SloTpot = Annotated[float, typer.Option(min=0.001, help="Objective for TPOT, in seconds")]


def _job_command(kind: str, systems: Sequence[str], rounds: int | None, text: str) -> Callable[..., None]:
    """A command that runs jobs; rounds: by default."""

    def command(
        system: Systems = None,
        fabric: Shape = "2P4D",
        model: Model = "ds-660b",
        set_name: Set = "64K",
        agents: Agents = None,
        windows: Windows = None,
        turns: Turns = None,
        rounds: Rounds = rounds,
        time_factor: TimeFactor = 4.0,
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
        size = _size(quick, agents, windows, turns, rounds)
        setting = replace(
            _setting(fabric, model, set_name, size, time_factor, seed),
            know_hits=not look_up,
            append_scale=append_scale,
            generation_scale=generation_scale,
        )
        _jobs(kind, [(setting, size)], system or (QUICK_SYSTEMS if quick else systems), whole, pacing, out, progress)

    command.__doc__ = text
    return command


def sweep(
    axis: Annotated[Axis, typer.Argument(help="What to vary")],
    values: Annotated[str, typer.Argument(help="Its values, with commas: 32,64,128; 32K,64K; 0.5,1,2; 1P1D,2P1D")],
    system: Systems = None,
    fabric: Shape = "2P4D",
    model: Model = "ds-660b",
    set_name: Set = "64K",
    agents: Agents = None,
    windows: Windows = None,
    turns: Turns = None,
    rounds: Rounds = None,
    time_factor: TimeFactor = 4.0,
    seed: Seed = 0,
    pacing: Paced = Pacing.AUTO,
    quick: Quick = False,
    out: Out = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Compare at several values of one thing."""
    size = _size(quick, agents, windows, turns, rounds)
    base = _setting(fabric, model, set_name, size, time_factor, seed)
    points = [varied(base, size, axis, value.strip()) for value in values.split(",")]
    _jobs("sweep", points, system or QUICK_SYSTEMS, False, pacing, out, progress)


def capacity(
    system: Systems = None,
    aps: Annotated[list[float] | None, typer.Option(help="Rates to run at, instead of a search; repeat")] = None,
    fabric: Shape = "2P4D",
    model: Model = "ds-660b",
    set_name: Set = "64K",
    turns: Turns = None,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Real seconds of arrivals", show_default=str(FULL.duration_s))
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.001, help="Where the search ends, as a share of the rate")] = 0.06,
    trials: Annotated[int, typer.Option(min=1, help="Runs a system at most")] = 7,
    slo_ttft: SloTtft = 4.0,
    slo_tpot: SloTpot = 0.05,
    time_factor: TimeFactor = 4.0,
    seed: Seed = 0,
    look_up: LookUp = False,
    pacing: Paced = Pacing.AUTO,
    quick: Quick = False,
    out: Out = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """Agents arrive at random: the largest rate that each system serves within the objectives, found by search."""
    size = _size(quick, None, None, turns, None)
    setting = replace(_setting(fabric, model, set_name, size, time_factor, seed), know_hits=not look_up)
    systems = _known(system or ["basic", "dualpath"])
    window = Window(duration or size.duration_s, Slo(slo_ttft, slo_tpot))

    async def work(on_run: OnRun) -> dict[str, Any]:
        if aps:
            result = await at_rates(setting, systems, aps, window, pacing.namespaces, on_run)
            return {**setting.describe(result["placement"]), **result, "ratios": {}}
        result = await capacities(setting, systems, window, tolerance, trials, pacing.namespaces, on_run)
        return {**setting.describe(result["placement"]), **result, "ratios": capacity_ratios(result["capacity"])}

    _execute("online", work, out, progress)


def report(
    directory: Annotated[Path, typer.Argument(help="With results (*.json)", exists=True, file_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The page", show_default="report.html in the directory")] = None,
) -> None:
    """One HTML page with plots out of result files."""
    from loadgen.report_html import write_report

    target = out or directory / "report.html"
    with _errors():
        write_report([_read(path) for path in sorted(directory.glob("*.json"))], target)
    print(target)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("offline")(
        _job_command("offline", ["dualpath"], 1, "N agents start at once: job completion time of one or more systems.")
    )
    app.command("compare")(
        _job_command(
            "compare", list(SYSTEMS), None, "The same jobs by several systems, in paired, interleaved rounds: ratios."
        )
    )
    app.command("ablate")(_job_command("ablate", CHAIN, None, "What each step from basic to dualpath brings."))
    app.command("sweep")(sweep)
    app.command("capacity")(capacity)
    app.command("report")(report)


def varied(setting: Setting, size: Size, axis: Axis, value: str) -> tuple[Setting, Size]:
    """One point of a sweep. ConfigError for a value that is none."""
    try:
        match axis:
            case Axis.AGENTS:
                agents = int(value)
                return setting, replace(size, agents=agents, windows=round(size.windows * agents / size.agents))
            case Axis.MAL:
                return replace(setting, workload=value), size
            case Axis.APPEND:
                return replace(setting, append_scale=float(value)), size
            case Axis.GENERATION:
                return replace(setting, generation_scale=float(value)), size
            case Axis.NODES:
                prefill, decode = parse_shape(value)
                return replace(setting, prefill=prefill, decode=decode), size
    except ValueError:
        raise ConfigError(f"{value!r} is no value of {axis.value}") from None


def parse_shape(text: str) -> tuple[int, int]:
    """'2P4D' -> (2, 4), nodes. ConfigError."""
    match = re.fullmatch(r"([1-9]\d{0,2})P([1-9]\d{0,2})D", text.strip().upper())
    if match is None:
        raise ConfigError(f"{text!r} is not a shape: write, say, 2P4D for two prefill and four decode nodes")
    return int(match[1]), int(match[2])


def _size(
    quick: bool, agents: int | None, windows: int | None, turns: int | None, rounds: int | None
) -> Size:
    size = QUICK if quick else FULL
    given = {"agents": agents, "windows": windows, "turns": turns, "rounds": rounds}
    if agents is not None and windows is None:
        given["windows"] = round(size.windows * agents / size.agents)
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def _setting(fabric: str, model: str, set_name: str, size: Size, time_factor: float, seed: int) -> Setting:
    with _errors():
        prefill, decode = parse_shape(fabric)
        setting = Setting(
            model=model,
            prefill=prefill,
            decode=decode,
            workload=set_name,
            turns=size.turns,
            time_factor=time_factor,
            seed=seed,
        )
        setting.scaling  # noqa: B018  the model's name is looked at here
        return setting


def _known(systems: Sequence[str]) -> list[str]:
    """The systems, each once. Ends the program for one that is not in the table."""
    with _errors():
        for system in systems:
            if system not in SYSTEMS:
                raise ConfigError(f"--system {system!r} is unknown: one of {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(systems))


def _jobs(
    kind: str,
    points: Sequence[tuple[Setting, Size]],
    systems: Sequence[str],
    whole: bool,
    pacing: Pacing,
    out: Path | None,
    progress: ProgressMode,
) -> None:
    systems = _known(systems)

    async def work(on_run: OnRun) -> dict[str, Any]:
        results = [
            await compare(setting, systems, size.agents, size.windows, size.rounds, whole, pacing.namespaces, on_run)
            for setting, size in points
        ]
        head = points[0][0].describe(results[0]["placement"])
        runs = [run for result in results for run in result["runs"]]
        parts = [
            {
                **setting.place(),
                "agents": size.agents,
                "ratios": ratios(result["runs"]),
                "spreads": spreads(result["runs"]),
                "bound_ratios": bound_ratios(setting, result["runs"], size.agents, size.windows),
            }
            for (setting, size), result in zip(points, results, strict=True)
        ]
        return {**head, "runs": runs, **(parts[0] if len(parts) == 1 else {"points": parts, "ratios": {}})}

    _execute(kind, work, out, progress)


def _execute(
    kind: str, work: Callable[[OnRun], Coroutine[Any, Any, dict[str, Any]]], out: Path | None, progress: ProgressMode
) -> None:
    """Run, print, write. Exit status: 0, 2 if it could not be run, 130 if interrupted."""
    with _errors():
        if out is not None and not out.absolute().parent.is_dir():
            raise ConfigError(f"result file {out}: no such directory: create {out.parent} first")
        with runs_progress(progress) as on_run:
            result = {"kind": kind, **uvloop.run(work(on_run))}
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
        print_runs(result, console)
        if "capacity" in result:
            print_capacity(result, console)
        for point in result.get("points", [result]):
            print_ratios(point, console)
        if out is not None:
            write_result(result, out)


@contextmanager
def _errors() -> Iterator[None]:
    """What is wrong with the input, or with the cluster, in one line; an interrupt without a traceback."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result
    except (OSError, ValueError) as error:
        raise ConfigError(f"result {path}: {error}") from None
