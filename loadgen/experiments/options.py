"""Options that commands share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError
from loadgen.experiments.sizes import FULL
from loadgen.progress import ProgressMode
from loadgen.systems import SYSTEMS
from loadgen.workload.source import DEFAULT_SET


def positive(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter("must be a number above 0")
    return value


def one_of(option: str, value: str, names: Iterable[str]) -> str:
    """The value. ConfigError, with the nearest name, if it is none of them."""
    known = list(names)
    if value in known:
        return value
    near = get_close_matches(value, known, n=1, cutoff=0.0)
    raise ConfigError(f"{option} {value!r} is unknown: one of {', '.join(known)}; the nearest is {near[0]}")


class Pacing(StrEnum):
    """What gives NICs their rates."""

    AUTO = "auto"          # the kernel where that can be had, else user space
    KERNEL = "kernel"
    USER = "user"

    @property
    def namespaces(self) -> bool | None:
        return {Pacing.AUTO: None, Pacing.KERNEL: True, Pacing.USER: False}[self]


# -- all commands --

Out = Annotated[Path | None, typer.Option(help="Write the result here, as JSON", dir_okay=False, writable=True)]
Show = Annotated[ProgressMode, typer.Option(help="On stderr: a bar on a terminal, or a JSON line a turn, or nothing")]
SloTtft = Annotated[float, typer.Option(callback=positive, help="Objective for TTFT, in seconds")]
SloTpot = Annotated[float, typer.Option(callback=positive, help="Objective for TPOT, in seconds")]

# -- online --

Burstiness = Annotated[
    float,
    typer.Option(
        "--cv", min=0.01, max=100, callback=positive,
        help="Variation of the times between arrivals: 1 is a Poisson process, more comes in bursts (Gamma)",
    ),
]

# -- sessions against a server --

SessionsFile = Annotated[Path, typer.Option(help="Sessions, as JSON lines", show_default="those of the package")]
MaxSessions = Annotated[int | None, typer.Option(min=1, help="Use the first N sessions only")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Use the first N turns of each session only")]
MaxContext = Annotated[int | None, typer.Option(min=2, help="Divide each session's lengths until it fits N tokens")]
Scale = Annotated[int | None, typer.Option(min=1, help="Divide all lengths by K")]
Think = Annotated[bool, typer.Option("--think", help="Keep the think times between turns")]
TranscriptFile = Annotated[Path | None, typer.Option(help="Write every turn's token ids here, as JSON lines")]

# -- experiments on clusters of one's own --

Systems = Annotated[list[str] | None, typer.Option("--system", help=f"Repeat for several: {', '.join(SYSTEMS)}")]
Shape = Annotated[str, typer.Option(help="Nodes: xPyD for x prefill and y decode nodes")]
Model = Annotated[str, typer.Option(help="ds-660b, ds-27b or qwen-32b")]
Set = Annotated[
    str | None,
    typer.Option("--set", help="Trajectories like those of the paper's set 32K, 48K or 64K", show_default=DEFAULT_SET),
]
RealSessions = Annotated[
    Path | None, typer.Option("--sessions", help="Instead of a set, windows of real sessions: a file of JSON lines")
]
ToolTime = Annotated[
    str, typer.Option("--gaps", help="Tool time between turns: off, traced, or MEDIAN,SIGMA (lognormal, seconds)")
]
Agents = Annotated[int | None, typer.Option(min=1, help="Agents at a time", show_default=str(FULL.agents))]
Windows = Annotated[int | None, typer.Option(min=1, help="Windows that are played", show_default=str(FULL.windows))]
Turns = Annotated[int | None, typer.Option(min=1, help="Turns of a window", show_default=str(FULL.turns))]
FromStart = Annotated[
    bool, typer.Option("--from-start", help="Windows are trajectories' first turns: a job's beginning")
]
Rounds = Annotated[int | None, typer.Option(min=1, help="Paired rounds", show_default=str(FULL.rounds))]
TimeFactor = Annotated[
    float | None,
    typer.Option(callback=lambda value: value and positive(value), help="Times are stretched by this while running",
                 show_default="what two cores can follow"),
]
Seed = Annotated[int, typer.Option(help="Decides windows and arrivals")]
LookUp = Annotated[bool, typer.Option("--look-up", help="Hits are looked up in the store, not given by the client")]
Whole = Annotated[bool, typer.Option("--whole", help="Run to the last agent's end, for the makespan")]
Paced = Annotated[Pacing, typer.Option(help="NIC rates by the kernel (namespaces, needs root) or in user space")]
AppendScale = Annotated[float, typer.Option(callback=positive, help="Appended lengths times this")]
GenerationScale = Annotated[float, typer.Option(callback=positive, help="Generated lengths times this")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run, under 10 minutes")]
