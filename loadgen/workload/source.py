"""What an experiment plays: trajectories of a set of Table 2 or real agent sessions, how long, with which tool time.

All of it is chosen here; loadgen.experiments.setting takes windows of what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.workload.gaps import GapKind, Gaps, with_gaps
from common.workload.scaling import Selection, Workload, fit
from common.workload.sessions import read_sessions
from common.workload.synthetic import SET_SIZE, generate
from common.workload.table2 import TABLE2
from common.workload.trajectories import Trajectory

DEFAULT_SET = "64K"
#: Of drawn gaps: beyond, single ones last for years.
MAX_MEDIAN_S, MAX_SIGMA = 3600.0, 4.0


@dataclass(frozen=True, slots=True)
class Source:
    """set: of Table 2, whose synthetic trajectories end at its maximum; ConfigError for one that is none. sessions: a
    file of real ones instead, at native length. append_scale, generation_scale: of either's lengths. gaps: tool time
    between turns, real seconds."""

    set: str = DEFAULT_SET
    sessions: str = ""
    append_scale: float = 1.0
    generation_scale: float = 1.0
    gaps: Gaps = field(default_factory=Gaps)

    def __post_init__(self) -> None:
        if self.set not in TABLE2:
            raise ConfigError(f"no trajectory set {self.set!r}: choose one of {', '.join(TABLE2)}")

    def max_length(self, limit: int) -> int:
        """Of an agent, in tokens (the paper's MAL). limit: of a context in the cluster."""
        return limit if self.sessions else min(limit, int(TABLE2[self.set].max_length))

    def load(self, limit: int, seed: int) -> Played:
        """Cut at `limit` tokens of context; seed decides drawn gaps. ConfigError for a file that is none,
        or if nothing fits."""
        native = read_sessions(Path(self.sessions)).trajectories if self.sessions else generate(self.set, SET_SIZE)
        selection = Selection(
            append_factor=self.append_scale, generate_factor=self.generation_scale, max_length=self.max_length(limit)
        )
        fitted = fit(native, selection, limit)
        return Played(self, fitted, tuple(with_gaps(fitted.trajectories, self.gaps, seed)))


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a source. fitted: with what was cut."""

    source: Source
    fitted: Workload
    trajectories: tuple[Trajectory, ...]

    @property
    def origin(self) -> str:
        """Where a trajectory is from, and what was cut, for people."""
        source, fitted = self.source, self.fitted
        if not source.sessions:
            origin = f"a synthetic one of the {source.set} set"
        else:
            origin = f"one of {len(self.trajectories)} real sessions of {source.sessions} at native length"
        if fitted.cut_turns or fitted.dropped_sessions:
            origin += (
                f" (no turn beyond {fitted.selection.max_length} tokens, which every system can hold:"
                f" {fitted.cut_turns} turns of {fitted.cut_sessions} trajectories are cut, and all of"
                f" {fitted.dropped_sessions} more)"
            )
        return origin

    @property
    def pauses(self) -> str:
        """The tool time, for people."""
        match self.source.gaps.kind:
            case GapKind.OFF:
                return "no tool time between turns"
            case GapKind.TRACED:
                return "tool time between turns as traced"
            case GapKind.LOGNORMAL:
                gaps = self.source.gaps
                return f"tool time between turns lognormal, median {gaps.median_s:g} s, sigma {gaps.sigma:g}"

    def describe(self) -> dict[str, Any]:
        """For a result's JSON: what was taken and cut, in numbers."""
        told = self.fitted.describe()
        for divided in ("factors", "scale", "max_context"):  # nothing is, here
            del told[divided]
        return told


def chosen(
    set_name: str | None, sessions: Path | None, gaps: str, append_scale: float = 1.0, generation_scale: float = 1.0
) -> Source:
    """Out of a command's options. ConfigError if they contradict each other."""
    if set_name is not None and sessions is not None:
        raise ConfigError("--set and --sessions both say what is played: give one of them")
    parsed = parse_gaps(gaps)
    if parsed.kind is GapKind.TRACED and sessions is None:
        raise ConfigError("--gaps traced: synthetic trajectories have no times: add --sessions FILE, or write 10,1")
    return Source(set_name or DEFAULT_SET, str(sessions or ""), append_scale, generation_scale, parsed)


def parse_gaps(text: str) -> Gaps:
    """'off', 'traced' or 'MEDIAN,SIGMA' of a lognormal distribution, in real seconds. ConfigError."""
    if text in (GapKind.OFF, GapKind.TRACED):
        return Gaps(GapKind(text))
    try:
        median_s, sigma = (float(part) for part in text.split(","))
        gaps = Gaps(GapKind.LOGNORMAL, median_s, sigma)
    except ValueError:
        gaps = None
    if gaps is None or gaps.median_s > MAX_MEDIAN_S or gaps.sigma > MAX_SIGMA:
        raise ConfigError(
            f"--gaps {text!r}: write off, traced, or a lognormal distribution's median, up to {MAX_MEDIAN_S:g} s, and"
            f" sigma, up to {MAX_SIGMA:g}: 10,1"
        )
    return gaps
