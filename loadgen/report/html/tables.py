"""The table of systems: what each took, against Basic, Oracle and the planner's formula. Pure: rows of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from loadgen.report.html.runs import Place, Run, ratios, spread
from loadgen.report.html.style import digits, systems_of, title

BASE, BEST = "basic", "oracle"
NOTHING = "–"
COLUMNS = (
    "system",
    "runs",
    "JCT (s)",
    "makespan (s)",
    "Basic / system",
    "system / Oracle",
    "formula's bound (s)",
    "JCT / bound",
    "bound by",
    "TTFT p50 (s)",
    "TTFT p99 (s)",
    "TTST mean (s)",
    "TPOT mean (s)",
    "trajectory JCT mean (s)",
    "SNIC max/avg",
    "attention max/avg",
)


def system_table(runs: Sequence[Run]) -> tuple[list[str], list[tuple[str, list[list[str]]]]]:
    """Header, and (title, rows) for each set of runs that differ in their system only, in order of appearance. Columns
    without a value are left out."""
    sets: dict[Place, list[Run]] = {}
    for run in runs:
        sets.setdefault(run.without(), []).append(run)
    blocks = [(title(place), [_row(group, system) for system in systems_of(group)]) for place, group in sets.items()]
    kept = [at for at in range(len(COLUMNS)) if any(row[at] != NOTHING for _, rows in blocks for row in rows)]
    return [COLUMNS[at] for at in kept], [(name, [[row[at] for at in kept] for row in rows]) for name, rows in blocks]


def _row(group: Sequence[Run], system: str) -> list[str]:
    mine = [run for run in group if run.system == system]
    jobs = [run.job_s for run in mine if run.job_s is not None]
    bounded = [(run.job_s, run.bound_s) for run in mine if run.job_s is not None and run.bound_s]
    return [
        system,
        str(len(mine)),
        _spread(jobs),
        _median(run.makespan_s for run in mine),
        _spread(ratios(group, BASE, system)) if system != BASE else NOTHING,
        _spread(ratios(group, system, BEST)) if system != BEST else NOTHING,
        _median(run.bound_s for run in mine),
        _spread([job / bound for job, bound in bounded]),
        next((run.bound_by for run in mine if run.bound_by), NOTHING),
        *(_median(run.latency[of].get(statistic) for run in mine) for of, statistic in _LATENCIES),
        *(_median(run.balance[kind].overall if kind in run.balance else None for run in mine) for kind in _BALANCES),
    ]


_LATENCIES = (("ttft", "p50"), ("ttft", "p99"), ("ttst", "mean"), ("tpot", "mean"), ("jct", "mean"))
_BALANCES = ("snic", "attention")


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return digits(median(known)) if known else NOTHING


def _spread(values: Sequence[float]) -> str:
    """Median, with the least and the greatest of several."""
    if not values:
        return NOTHING
    middle, least, greatest = spread(values)
    return digits(middle) if len(values) == 1 else f"{digits(middle)} ({digits(least)}–{digits(greatest)})"
