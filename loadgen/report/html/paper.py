"""Results of `loadgen paper`: each table or figure as ours beside the published, with what its runs do not show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.html.parts import cell, image, table
from loadgen.report.html.style import LOOKS, OTHER, PANEL_INCHES, Look, legend, panels
from loadgen.report.html.tables import NOTHING

_HEADER = ("", "ours", "published", "difference", "unit", "the published number is")
#: For lines that are no systems: the colours and markers of the systems, in their order.
_OTHERS = list(LOOKS.values())
#: A difference beyond this is named with a reason, or should be (percent).
_LIMIT = 20.0
_BAR_INCHES = 0.19


def exhibits_of(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [exhibit for result in results for exhibit in result.get("exhibits") or ()]


def sections(results: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """HTML, in order: what is held out, what was fitted, then every table and figure."""
    exhibits = exhibits_of(results)
    if not exhibits:
        return
    yield "<h2>The paper's tables and figures</h2>"
    if (figure := differences_figure(exhibits)) is not None:
        yield image("Differences from published numbers that nothing was fitted to", figure)
    yield from (_calibration(result["calibration"]) for result in results if result.get("calibration"))
    for exhibit in exhibits:
        yield f"<h2>{escape(_title(exhibit))}</h2>"
        yield table(_HEADER, [("", [_row(row) for row in exhibit["rows"]])])
        told = [*exhibit["notes"], *(f"{row['what']}: {row['why']}" for row in exhibit["rows"] if row["why"])]
        yield from (f"<p>{escape(line)}</p>" for line in told)
        if (figure := panels_figure(exhibit["panels"])) is not None:
            yield image(_title(exhibit), figure)


def differences_figure(exhibits: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A bar a held-out number, in percent; None without any."""
    told = {
        row["name"]: float(row["difference_percent"])
        for exhibit in exhibits
        for row in exhibit["rows"]
        if row["role"] == "held out" and row["difference_percent"] is not None
    }
    if not told:
        return None
    figure, [panel] = panels(1)
    figure.set_size_inches(2 * PANEL_INCHES[0], 1 + _BAR_INCHES * len(told))
    places = range(len(told))
    colors = [LOOKS["dualpath"].color if abs(off) <= _LIMIT else LOOKS["dualpath+split"].color for off in told.values()]
    panel.barh(places, list(told.values()), color=colors, height=0.7)
    panel.set_yticks(places, [name.replace("_", " ") for name in told], fontsize=7)
    panel.invert_yaxis()
    for edge in (-_LIMIT, _LIMIT):
        panel.axvline(edge, color="black", linestyle="--", linewidth=0.8)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_xlabel("ours against published, held out (%)")
    return figure


def panels_figure(told: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Lines, or bars where x are names; None without panels."""
    if not told:
        return None
    figure, axes = panels(len(told))
    for panel, one in zip(axes, told, strict=True):
        if any(isinstance(x, str) for line in one["lines"] for x in line["x"]):
            _bars(panel, one["lines"])
        else:
            _lines(panel, one["lines"])
        panel.set_title(one["title"], fontsize=8)
        panel.set_xlabel(one["x"])
        panel.set_ylabel(one["y"])
        greatest = max((y for line in one["lines"] for y in line["y"] if y is not None), default=1.0)
        panel.set_ylim(0, 1.08 * greatest)
    legend(figure, axes)
    return figure


def _lines(panel: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    others = cycle(_OTHERS)
    for line in lines:
        shown = [(x, y) for x, y in zip(line["x"], line["y"], strict=True) if y is not None]
        style = _look(line["name"], others)
        many = len(shown) > 20
        panel.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            color=style.color,
            marker=None if many else style.marker,
            linewidth=1.0 if many else 1.4,
            label=line["name"],
        )


def _bars(panel: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    others = cycle(_OTHERS)
    width = 0.8 / len(lines)
    for index, line in enumerate(lines):
        places = [at + (index - (len(lines) - 1) / 2) * width for at in range(len(line["x"]))]
        panel.bar(places, line["y"], width * 0.92, color=_look(line["name"], others).color, label=line["name"])
    names = [str(x).replace(" (", "\n(") for x in lines[0]["x"]]
    panel.set_xticks(range(len(names)), names, fontsize=6.5)


def _look(name: str, others: Iterable[Look]) -> Look:
    return LOOKS[name] if name in LOOKS else next(iter(others), OTHER)


def _row(row: Mapping[str, Any]) -> list[str]:
    off, form = row["difference_percent"], row["form"]
    return [
        row["what"],
        cell(row["ours"]),
        f"{form} {cell(row['published'])}".strip(),
        NOTHING if off is None else f"{off:+.1f} %",
        row["unit"],
        NOTHING if row["role"] == "none" else f"{row['role']} ({row['source']})",
    ]


def _calibration(told: Mapping[str, Any]) -> str:
    rows = [
        [name, constant, cell(values["fitted"]), cell(values["default"]), ", ".join(one["fitted_to"])]
        for name, one in told.items()
        for constant, values in one["constants"].items()
    ]
    return "<h2>Calibration</h2>\n" + table(("for", "constant", "fitted", "default", "to"), [("", rows)])


def _title(exhibit: Mapping[str, Any]) -> str:
    return f"{exhibit['name']}: {exhibit['title']}"
