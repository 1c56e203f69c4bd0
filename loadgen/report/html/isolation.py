"""Results of `loadgen bench isolation`: what a small message of the high class waits, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from loadgen.report.html.parts import cell, image, table
from loadgen.report.html.style import PART_COLORS, legend, panels

_HEADER = ("phase", "messages", "p50 (us)", "p99 (us)", "p50 / idle", "p99 / idle")
_PERCENTILES = {"p50": PART_COLORS[1], "p99": PART_COLORS[3]}
HEADING = "Isolation of the high class on the compute network"


def isolations_of(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [result for result in results if result.get("isolation")]


def isolation_sections(results: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """HTML: a table and a figure each."""
    for result in isolations_of(results):
        yield f"<h2>{HEADING}</h2>"
        yield f"<p>{escape(str(result.get('network', '')))}; medians of rounds</p>"
        yield table(_HEADER, [("", [_row(result, name) for name in result["isolation"]])])
        yield image(HEADING, isolation_figure(result))


def isolation_figure(result: Mapping[str, Any]) -> Figure:
    """Bars on a logarithmic scale, one group a phase."""
    told = result["isolation"]
    figure, [panel] = panels(1)
    figure.set_size_inches(1.2 + 1.1 * len(told), 3.2)
    for index, (name, color) in enumerate(_PERCENTILES.items()):
        places = [at + (index - 0.5) * 0.4 for at in range(len(told))]
        panel.bar(places, [phase[f"{name}_us"] for phase in told.values()], 0.38, color=color, label=name)
    panel.set_yscale("log")
    panel.set_ylabel("round trip of a small message (us)")
    panel.set_xticks(range(len(told)), [name.replace("_", "\n") for name in told], fontsize=7)
    legend(figure, [panel])
    return figure


def _row(result: Mapping[str, Any], name: str) -> list[str]:
    phase, ratios = result["isolation"][name], result.get("ratios") or {}
    slower = [cell(ratios.get(f"{name}_over_idle_{percentile}")) for percentile in _PERCENTILES]
    return [name.replace("_", " "), f"{phase['n']:,}", cell(phase["p50_us"]), cell(phase["p99_us"]), *slower]
