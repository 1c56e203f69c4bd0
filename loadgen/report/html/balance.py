"""How even the load was over time (the paper's Figures 13 and 14): of storage NICs over nodes, of attention time over
the engines of a group."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from loadgen.report.html.runs import Run, telling
from loadgen.report.html.style import look, name_panel, panels, systems_of

_NAMES = {"snic": "SNIC traffic, max/avg over nodes", "attention": "attention time, max/avg in a group"}


def balance_figure(runs: Sequence[Run]) -> Figure | None:
    """Two panels a cluster: the first run of each system that was sampled; its mean, dashed, is in the legend."""
    sampled = {kind: [run for run in runs if kind in run.balance and run.balance[kind].at_s] for kind in _NAMES}
    sets = [(kind, place, group) for kind, told in sampled.items() for place, group in telling(told)]
    if not sets:
        return None
    figure, axes = panels(len(sets), 2)
    for panel, (kind, place, group) in zip(axes, sets, strict=True):
        for system in systems_of(group):
            shown = next(run.balance[kind] for run in group if run.system == system)
            color, label = look(system).color, system
            if shown.mean is not None:
                panel.axhline(shown.mean, color=color, linestyle="--", linewidth=1.2)
                label += f" {shown.mean:.2f}"
            panel.plot(shown.at_s, shown.max_over_avg, color=color, linewidth=0.8, alpha=0.6, label=label)
        panel.set_ylim(bottom=1)
        panel.set_xlabel("time (s)")
        panel.set_ylabel(_NAMES[kind], fontsize=9)
        panel.legend(fontsize=6.5, ncols=2, frameon=False)
        name_panel(panel, place)
    return figure
