"""What a dashboard is made of, and its JSON as Grafana reads it (schema version 39, Grafana 10.4 or later)."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

#: The time over which Grafana takes rates: it knows how often Prometheus scrapes, and how wide a point is.
RATE = "$__rate_interval"
COLUMNS = 24
HEADER_HEIGHT = 1
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "dualpath"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression. legend: of each of its series, with {{label}} for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over time. unit: as Grafana names it (s, Bps, bytes, reqps, percentunit, short ...). about: what is seen
    here, and what it means if it is not as it should be. width: in columns of 24."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    about: str
    width: int = 8
    height: int = 8
    stacked: bool = False
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Stat(Panel):
    """One number: the last one."""

    width: int = 3
    height: int = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, from left to right, wrapped."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """uid: its name in addresses, and that of its file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def by_process(expr: str) -> str:
    """Series of single processes, with the process's name and its node as labels."""
    return f"{expr} * on (instance) group_left (name, node) dualpath_process_info"


def render(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard's JSON, as plain values."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        header = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **header, "gridPos": _place(0, top, COLUMNS, HEADER_HEIGHT)})
        top += HEADER_HEIGHT
        left = line = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, line = top + line, 0, 0
            place = _place(left, top, panel.width, panel.height)
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": place})
            left, line = left + panel.width, max(line, panel.height)
        top += line
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "title": "DualPath", "tags": [TAG], "keepTime": True, "asDropdown": False}],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0}]},
        "panels": panels,
    }


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    common = {
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "targets": [_target(letter, query) for letter, query in zip(ascii_uppercase, panel.queries, strict=False)],
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if isinstance(panel, Stat):
        nothing = {"type": "special", "options": {"match": "null+nan", "result": {"text": "–"}}}
        defaults["mappings"] = [nothing]  # a share or a quantile of no requests
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
        return {"type": "stat", **common, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    defaults["custom"] = {
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 10,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {"type": "timeseries", **common, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def _target(letter: str, query: Query) -> dict[str, Any]:
    return {"refId": letter, "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend, "range": True}
