"""The paper's Table 2, trajectories measured the same way, and both side by side.

The reading: a column is a mean over trajectories, and append, generation and context are means over each trajectory's
turns first. Pooled over turns they would contradict the table: at 64K 157 turns of 429 + 176 tokens make 95K, but the
total is 56K; short trajectories with long turns raise the mean of means. Context is the prompt of a turn. MaxLen is the
longest history that occurs (K is 1,024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from statistics import fmean

from common.workload.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Columns:
    """The six columns. Lengths in tokens."""

    max_length: float
    turns: float
    append: float
    generate: float
    total: float
    context: float


TABLE2 = {
    "32K": Columns(32 << 10, 60, 608, 148, 28_639, 17_183),
    "48K": Columns(48 << 10, 106, 474, 172, 42_607, 25_120),
    "64K": Columns(64 << 10, 157, 429, 176, 55_958, 32_721),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One column: what the paper has, what the trajectories have, and by how much they are off."""

    column: str
    target: float
    ours: float
    difference_percent: float


def measure(trajectories: Sequence[Trajectory]) -> Columns:
    """The columns of whole trajectories, each with at least one turn."""
    return Columns(
        max_length=max(t.peak for t in trajectories),
        turns=fmean(len(t.turns) for t in trajectories),
        append=fmean(fmean(turn.append for turn in t.turns) for t in trajectories),
        generate=fmean(fmean(turn.generate for turn in t.turns) for t in trajectories),
        total=fmean(t.turns[-1].total for t in trajectories),
        context=fmean(fmean(turn.prompt for turn in t.turns) for t in trajectories),
    )


def fit_table(trajectories: Sequence[Trajectory], target: Columns) -> list[Comparison]:
    """All columns of trajectories beside the target's."""
    pairs = zip(fields(Columns), astuple(target), astuple(measure(trajectories)), strict=True)
    return [Comparison(field.name, want, have, 100 * (have / want - 1)) for field, want, have in pairs]


def as_rows(comparisons: Sequence[Comparison]) -> list[dict[str, float | str]]:
    """For the result: one object a column."""
    return [asdict(comparison) for comparison in comparisons]
