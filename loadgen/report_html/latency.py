"""Online figures: latencies against the arrival rate (the paper's 11), and what the time to first token is made of
(12)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.figure import Figure

from loadgen.report_html.runs import LATENCIES, PARTS, Run
from loadgen.report_html.style import PART_COLORS, legend, look, number, panels, systems_of, title

_NAMES = {"ttft": "TTFT (s)", "ttst": "TTST (s)", "tpot": "TPOT (s)", "jct": "JCT of a trajectory (s)"}


def online_figure(runs: Sequence[Run]) -> Figure | None:
    """A row of four panels for each cluster; means as lines, p99 dashed, objectives as horizontal lines. A hollow marker
    is a run with a validity flag that does not hold."""
    online = [run for run in runs if "aps" in run.place]
    places = sorted({run.without("aps", "agents") for run in online}, key=str)
    if not places:
        return None
    figure, axes = panels(len(LATENCIES) * len(places), len(LATENCIES))
    for row, place in enumerate(places):
        group = [run for run in online if run.without("aps", "agents") == place]
        for panel, measure in zip(axes[row * len(LATENCIES) :], LATENCIES, strict=False):
            for system in systems_of(group):
                mine = [run for run in group if run.system == system and run.latency[measure]]
                mine.sort(key=lambda run: float(run.place["aps"]))
                for statistic, line in (("mean", "-"), ("p99", ":")):
                    points = [(run.place["aps"], run.latency[measure][statistic]) for run in mine
                              if statistic in run.latency[measure]]
                    if points:
                        label = system if statistic == "mean" else None
                        panel.plot(*zip(*points, strict=True), line, color=look(system).color, label=label, linewidth=1.4)
                for run in mine:
                    if "mean" in run.latency[measure]:
                        panel.plot(run.place["aps"], run.latency[measure]["mean"], look(system).marker, markersize=6,
                                   color=look(system).color, fillstyle="none" if run.broken else "full")
            if slo := [run.slo[f"{measure}_s"] for run in group if f"{measure}_s" in run.slo]:
                panel.axhline(slo[0], color="black", linestyle="--", linewidth=0.9)
                panel.annotate(f"SLO {slo[0]:g} s", (1, slo[0]), (0, 3), ("axes fraction", "data"),
                               "offset points", ha="right", fontsize=8)
            panel.set_ylim(bottom=0)
            panel.set_xlabel("agents started a second (APS)")
            panel.set_ylabel(_NAMES[measure])
            panel.set_title(title(place), fontsize=9)
    legend(figure, axes)
    return figure


def parts_figure(runs: Sequence[Run]) -> Figure | None:
    """Stacked means, a bar a system, a panel a load."""
    told = [run for run in runs if run.parts_s]
    places = sorted({run.without() for run in told}, key=str)
    if not places:
        return None
    figure, axes = panels(len(places))
    for panel, place in zip(axes, places, strict=True):
        group = [run for run in told if run.without() == place]
        systems = systems_of(group)
        for index, system in enumerate(systems):
            bottom = 0.0
            for part, color in zip(PARTS, PART_COLORS, strict=True):
                height = median(run.parts_s.get(part, 0.0) for run in group if run.system == system)
                panel.bar(index, height, 0.7, bottom, color=color, label=part)
                bottom += height
            panel.annotate(number(bottom), (index, bottom), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        panel.set_xticks(range(len(systems)), systems, fontsize=7.5, rotation=20 if len(systems) > 4 else 0)
        panel.set_ylabel("mean TTFT (s)")
        panel.set_title(title(place), fontsize=9)
    legend(figure, axes)
    return figure
