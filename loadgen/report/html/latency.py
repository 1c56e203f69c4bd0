"""Online figures: latencies against the arrival rate (the paper's 10 and 11), and what the time to first token is made
of (12)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.html.runs import LATENCIES, PARTS, Run, telling
from loadgen.report.html.style import PART_COLORS, legend, look, name_panel, number, panels, systems_of

_NAMES = {"ttft": "TTFT (s)", "ttst": "TTST (s)", "tpot": "TPOT (s)", "jct": "JCT of a trajectory (s)"}
#: A panel with an objective ends at so many times of it, least and most: what is far beyond has failed.
_SLO_SHOWN = (1.2, 3.0)


def online_figure(runs: Sequence[Run]) -> Figure | None:
    """A row of four panels for each cluster."""
    online = [run for run in runs if "aps" in run.place]
    places = sorted({run.without("aps", "agents") for run in online}, key=str)
    if not places:
        return None
    figure, axes = panels(len(LATENCIES) * len(places), len(LATENCIES))
    for row, place in enumerate(places):
        group = [run for run in online if run.without("aps", "agents") == place]
        for panel, measure in zip(axes[row * len(LATENCIES) :], LATENCIES, strict=False):
            _latency(panel, group, measure)
            name_panel(panel, place)
    legend(figure, axes)
    return figure


def parts_figure(runs: Sequence[Run]) -> Figure | None:
    """Stacked means, a bar a system, a panel a cluster."""
    sets = telling(run for run in runs if run.parts_s)
    if not sets:
        return None
    figure, axes = panels(len(sets))
    for panel, (place, group) in zip(axes, sets, strict=True):
        systems = systems_of(group)
        for index, system in enumerate(systems):
            bottom = 0.0
            for part, color in zip(PARTS, PART_COLORS, strict=True):
                height = median(run.parts_s.get(part, 0.0) for run in group if run.system == system)
                panel.bar(index, height, 0.7, bottom, color=color, label=part)
                bottom += height
            panel.annotate(number(bottom), (index, bottom), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        panel.set_xticks(range(len(systems)), systems, fontsize=7.5, rotation=30, ha="right", rotation_mode="anchor")
        panel.set_ylabel("mean TTFT (s)")
        name_panel(panel, place)
    legend(figure, axes)
    return figure


def _latency(panel: Axes, runs: Sequence[Run], measure: str) -> None:
    """Lines through the means, dotted ones through the p99; a horizontal line at the objective. A hollow marker is a
    doubtful run."""
    for system in systems_of(runs):
        mine = sorted((run for run in runs if run.system == system), key=lambda run: float(run.place["aps"]))
        color, marker = look(system).color, look(system).marker
        for statistic, line in (("mean", "-"), ("p99", ":")):
            told = [run for run in mine if statistic in run.latency[measure]]
            aps = [float(run.place["aps"]) for run in told]
            values = [run.latency[measure][statistic] for run in told]
            label = system if statistic == "mean" else None
            panel.plot(aps, values, line, color=color, label=label, linewidth=1.4)
            if statistic == "mean":
                for run, at, value in zip(told, aps, values, strict=True):
                    panel.plot(at, value, marker, color=color, fillstyle="none" if run.doubtful else "full")
    panel.set_ylim(bottom=0)
    objectives = [run.slo[f"{measure}_s"] for run in runs if f"{measure}_s" in run.slo]
    if objectives:
        least, most = (times * objectives[0] for times in _SLO_SHOWN)
        panel.set_ylim(top=min(max(panel.get_ylim()[1], least), most))
        panel.axhline(objectives[0], color="black", linestyle="--", linewidth=0.9)
        panel.annotate(
            f"SLO {objectives[0]:g} s",
            (0, objectives[0]),
            (3, 3),
            ("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
        )
    panel.set_xlabel("agents started a second (APS)")
    panel.set_ylabel(_NAMES[measure])
