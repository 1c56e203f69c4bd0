"""How figures look: one colour, marker and place a system in all of them (Okabe and Ito's colours), SVG out."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.html.runs import Run, Value

PANEL_INCHES = (3.6, 2.7)
#: Of a legend's entry.
ENTRY_INCHES = (1.4, 0.25)
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
_TITLES = {
    "model": "{}",
    "nodes": "{}",
    "agents": "{} agents",
    "aps": "{} APS",
    "mal": "MAL {}",
    "append_scale": "append ×{}",
    "generation_scale": "generation ×{}",
}
#: Parts of a bar: colours that differ in lightness too.
PART_COLORS = ("#F0E442", "#56B4E9", "#D55E00", "#004D71")


def look(system: str) -> Look:
    return LOOKS.get(system, OTHER)


def systems_of(runs: Iterable[Run]) -> list[str]:
    """In the order of LOOKS, then the unknown ones."""
    names = {run.system for run in runs}
    return [name for name in LOOKS if name in names] + sorted(names - set(LOOKS))


def panels(count: int, columns: int = MAX_COLUMNS) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels."""
    columns = min(count, columns)
    rows = -(-count // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
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
    """One for all panels, above them; systems in the order of LOOKS."""
    entries: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = [name for name in LOOKS if name in entries] + [name for name in entries if name not in LOOKS]
    if labels:
        width, height = figure.get_size_inches()
        columns = int(width // ENTRY_INCHES[0])
        figure.set_size_inches(width, height + ENTRY_INCHES[1] * -(-len(labels) // columns))
        handles = [entries[label] for label in labels]
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def name_panel(panel: Axes, place: Iterable[tuple[str, Value]]) -> None:
    """Its title: what all its runs share."""
    panel.set_title(title(place), fontsize=8)


def title(place: Iterable[tuple[str, Value]]) -> str:
    """What all runs of a panel share; native lengths go without saying."""
    shared = dict(place)
    words = []
    for name, form in _TITLES.items():
        if (value := shared.get(name)) is not None and not (name.endswith("_scale") and value == 1):
            words.append(form.format(value if isinstance(value, str) else number(value)))
    return ", ".join(words)


def number(value: float) -> str:
    """At most three digits that matter, or a whole number, thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def digits(value: float) -> str:
    """number(), but always with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def svg(figure: Figure) -> bytes:
    """The same bytes for the same figure."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
