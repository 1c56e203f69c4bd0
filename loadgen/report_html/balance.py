"""How even the load was over time (the paper's Figure 14): of storage NICs over nodes, of attention time over the
engines of a group."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from loadgen.report_html.runs import Run
from loadgen.report_html.style import legend, look, panels, systems_of, title

_NAMES = {"snic": "SNIC traffic, max/avg over nodes", "attention": "attention time, max/avg in a group"}


def balance_figure(runs: Sequence[Run]) -> Figure | None:
    """A panel for each kind of load and each load of the cluster; the first run of each system that was sampled."""
    sampled = [(kind, run) for kind in _NAMES for run in runs if kind in run.balance and run.balance[kind].at_s]
    places = list(dict.fromkeys((kind, run.without()) for kind, run in sampled))
    if not places:
        return None
    figure, axes = panels(len(places), 2)
    for panel, (kind, place) in zip(axes, places, strict=True):
        group = [run for of, run in sampled if (of, run.without()) == (kind, place)]
        for system in systems_of(group):
            shown = next(run.balance[kind] for run in group if run.system == system)
            panel.plot(shown.at_s, shown.max_over_avg, color=look(system).color, linewidth=1.0, label=system)
            if shown.mean is not None:
                panel.axhline(shown.mean, color=look(system).color, linestyle="--", linewidth=0.8)
                panel.annotate(f"{shown.mean:.2f}", (1, shown.mean), (3, -3), ("axes fraction", "data"),
                               "offset points", color=look(system).color, fontsize=8)
        panel.set_ylim(bottom=1)
        panel.set_xlabel("time (s)")
        panel.set_ylabel(_NAMES[kind])
        panel.set_title(title(place), fontsize=9)
    legend(figure, axes)
    return figure
