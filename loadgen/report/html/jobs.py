"""Offline figures: job completion time by system against what a sweep varies (the paper's 7 to 9), and step by step
(12)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.html.runs import AXES, Place, Run, Value, ratios, spread
from loadgen.report.html.style import legend, look, name_panel, number, panels, systems_of
from loadgen.systems import CHAIN

Group = tuple[Place, list[Run]]


def sweep_figure(runs: Sequence[Run], axis: str) -> Figure | None:
    """Against an axis of AXES: a panel for each set of runs that differ in it only. None if nothing varies it.

    Agents are the exception: jobs that no sweep varies are shown with their one number of agents.
    """
    jobs = [run for run in runs if run.job_s]
    groups = _varied(jobs, axis)
    if axis == "agents":
        elsewhere = {id(run) for other in AXES if other != axis for _, group in _varied(jobs, other) for run in group}
        groups += [
            (place, alone)
            for place, group in _groups(jobs, axis)
            if (alone := [run for run in group if id(run) not in elsewhere]) and (place, group) not in groups
        ]
    if not groups:
        return None
    figure, axes = panels(len(groups))
    for panel, (place, group) in zip(axes, groups, strict=True):
        _job_bars(panel, group, axis)
        name_panel(panel, place)
    legend(figure, axes)
    return figure


def ablation_figure(runs: Sequence[Run]) -> Figure | None:
    """Job completion time of each step of CHAIN against the first; None unless a set of runs has it and two more."""
    jobs = [run for run in runs if run.job_s and run.system in CHAIN]
    groups = [(place, group) for place, group in _groups(jobs) if _complete(group)]
    if not groups:
        return None
    figure, axes = panels(len(groups))
    for panel, (place, group) in zip(axes, groups, strict=True):
        for index, system in enumerate(CHAIN):
            values = ratios(group, system, CHAIN[0])
            if values:
                middle, least, greatest = spread(values)
                panel.bar(index, middle, color=look(system).color, width=0.7)
                panel.errorbar(index, middle, [[middle - least], [greatest - middle]], color="black", capsize=3)
                change = f"{100 * (middle - 1):+.0f} %" if system != CHAIN[0] else ""
                above = (index, greatest)
                panel.annotate(change, above, (0, 4), textcoords="offset points", ha="center", fontsize=9)
        panel.set_xticks(range(len(CHAIN)), CHAIN, fontsize=7.5)
        panel.set_ylabel("JCT / JCT of Basic")
        name_panel(panel, place)
    return figure


def _job_bars(panel: Axes, runs: Sequence[Run], axis: str) -> None:
    """A cluster of bars a value of the axis: medians over repeats, with the least and the greatest."""
    points = sorted({run.place[axis] for run in runs if axis in run.place}, key=_order) or [""]
    width = 0.8 / len(systems_of(runs))
    for point, value in enumerate(points):
        there = [run for run in runs if run.place.get(axis, "") == value]
        systems = systems_of(there)
        for index, system in enumerate(systems):
            middle, least, greatest = spread([run.job_s for run in there if run.system == system and run.job_s])
            at = point + (index - (len(systems) - 1) / 2) * width
            panel.bar(at, middle, width * 0.92, color=look(system).color, label=system)
            panel.errorbar(at, middle, [[middle - least], [greatest - middle]], color="black", linewidth=0.8, capsize=2)
    panel.set_xticks(range(len(points)), [number(p) if isinstance(p, int | float) else p for p in points])
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel("job completion time (s)")


def _groups(runs: Iterable[Run], *axes: str) -> list[Group]:
    """Runs that differ in these axes only, together."""
    groups: dict[Place, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.without(*axes)].append(run)
    return sorted(groups.items(), key=lambda item: [(name, _order(value)) for name, value in item[0]])


def _varied(runs: Iterable[Run], axis: str) -> list[Group]:
    return [
        (place, group)
        for place, group in _groups(runs, axis)
        if len({run.place.get(axis) for run in group} - {None}) > 1
    ]


def _complete(runs: Sequence[Run]) -> bool:
    systems = {run.system for run in runs}
    return CHAIN[0] in systems and len(systems) > 2


def _order(value: Value) -> tuple[float, str]:
    return (value, "") if isinstance(value, int | float) else (0.0, value)
