"""How figures look: one colour, marker and place a system in all of them (Okabe and Ito's colours), SVG out."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report_html.runs import Run, Value

PANEL_INCHES = (3.6, 2.7)
#: A legend's height.
LEGEND_INCHES = 0.45
MAX_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Look:
    color: str
    marker: str


LOOKS = {
    "basic": Look("#5A5A5A", "o"),
    "tiered": Look("#CC79A7", "v"),
    "basic+layerwise": Look("#E69F00", "s"),
    "+dual": Look("#56B4E9", "D"),
    "dualpath": Look("#0072B2", "^"),
    "dualpath+split": Look("#D55E00", "P"),
    "oracle": Look("#009E73", "*"),
}
OTHER = Look("#000000", "X")
#: Parts of a bar: colours that differ in lightness too.
PART_COLORS = ("#F0E442", "#56B4E9", "#D55E00", "#004D71")


def look(system: str) -> Look:
    return LOOKS.get(system, OTHER)


def systems_of(runs: Iterable[Run]) -> list[str]:
    """In the order of LOOKS, then the unknown ones."""
    names = {run.system for run in runs}
    return [name for name in LOOKS if name in names] + sorted(names - set(LOOKS))


def panels(count: int, columns: int = MAX_COLUMNS) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, with room for a legend above them."""
    columns = min(count, columns)
    rows = -(-count // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + LEGEND_INCHES), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    for used in axes[:count]:
        used.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        used.set_axisbelow(True)
        used.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One for all panels, above them."""
    entries = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=7, frameon=False, fontsize=8)


def title(place: Iterable[tuple[str, Value]]) -> str:
    """What all runs of a panel share."""
    words = []
    for name, value in sorted(place, key=lambda item: ("model", "nodes", "mal", "agents").index(item[0])
                              if item[0] in ("model", "nodes", "mal", "agents") else 9):
        shown = number(value) if isinstance(value, int | float) else value
        words.append({"model": "{}", "nodes": "{}", "agents": "{} agents", "mal": "MAL {}", "aps": "{} APS"}
                     .get(name, name.removesuffix("_scale") + " ×{}").format(shown))
    return ", ".join(words)


def number(value: float) -> str:
    """Three digits that matter, thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def svg(figure: Figure) -> bytes:
    """The same bytes for the same figure."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
