"""A dashboard as a page that any browser shows: its panels where Grafana would have them, drawn from a live Prometheus.

Grafana's own drawing is not this; what is to be seen are the curves, their number, their names and their units.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tests.dashboards_support import Prometheus, dashboard

COLUMN_PX, LINE_PX = 60, 36
_STYLE = f"""
body {{ font: 13px system-ui, sans-serif; margin: 0; background: #f4f5f5; }}
main {{ display: grid; grid-template-columns: repeat(24, {COLUMN_PX}px); grid-auto-rows: {LINE_PX}px; }}
div {{ background: white; margin: 3px; padding: 4px; overflow: hidden; }} h2 {{ font-size: 15px; margin: 8px 4px; }}
b {{ display: block; }} big {{ font-size: 28px; color: #1a7f37; }} img {{ width: 100%; }}
"""


def write_page(path: Path, page: Path, asked: Prometheus, rate: str, since_s: float) -> tuple[int, int]:
    """Write the page of a dashboard's file, over the last seconds; its width and height in pixels."""
    told = dashboard(path)
    cells = "".join(_cell(panel, asked, rate, since_s) for panel in told["panels"])
    page.write_text(
        f'<!doctype html><html><head><meta charset="utf-8"><style>{_STYLE}</style></head>'
        f"<body><h2>{escape(told['title'])}</h2><main>{cells}</main></body></html>"
    )
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in told["panels"])
    return 24 * COLUMN_PX, (lines + 2) * LINE_PX


def _cell(panel: dict[str, Any], asked: Prometheus, rate: str, since_s: float) -> str:
    place = panel["gridPos"]
    area = f"grid-area: {place['y'] + 1} / {place['x'] + 1} / span {place['h']} / span {place['w']}"
    if panel["type"] == "row":
        return f'<h2 style="{area}">{escape(panel["title"])}</h2>'
    curves = list(_curves(panel, asked, rate, since_s))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    title = f"<b>{escape(panel['title'])} ({unit})</b>"
    if panel["type"] == "stat":
        last = f"{curves[0][2][-1]:.3g}" if curves else "–"
        return f'<div style="{area}">{title}<big>{last}</big></div>'
    size = (place["w"] * COLUMN_PX / 100, place["h"] * LINE_PX / 100 - 0.35)
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    return f'<div style="{area}">{title}{_image(panel["title"], curves, size, stacked)}</div>'


def _curves(
    panel: dict[str, Any], asked: Prometheus, rate: str, since_s: float
) -> Iterator[tuple[str, list[float], list[float]]]:
    """(name, seconds before the end, values)."""
    now = round(asked.at or time.time())
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", rate)
        span = {"start": str(now - since_s), "end": str(now), "step": "1"}
        for series in asked.get("query_range", query=expr, **span)["result"]:
            labels = series["metric"]
            name = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], "?"), target["legendFormat"])  # noqa: B023
            times, values = zip(*series["values"], strict=True)
            yield name, [each - now for each in times], [float(each) for each in values]


def _image(
    title: str, curves: list[tuple[str, list[float], list[float]]], size: tuple[float, float], stacked: bool
) -> str:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    below: dict[float, float] = {}
    for name, times, values in curves:
        if stacked:
            floor = [below.get(at, 0.0) for at in times]
            values = [low + value for low, value in zip(floor, values, strict=True)]
            axes.fill_between(times, floor, values, alpha=0.4)
            below.update(zip(times, values, strict=True))
        axes.plot(times, values, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    if curves:
        figure.legend(fontsize=6, loc="outside lower left", ncols=4, frameon=False)
    else:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center")
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{b64encode(drawn.getvalue()).decode()}">'
