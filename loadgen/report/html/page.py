"""The page: what does not hold first, then the table, the figures, and what produced them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from common.errors import ConfigError
from loadgen.report.html.balance import balance_figure
from loadgen.report.html.isolation import isolation_sections, isolations_of
from loadgen.report.html.jobs import ablation_figure, sweep_figure
from loadgen.report.html.latency import online_figure, parts_figure
from loadgen.report.html.paper import exhibits_of, sections
from loadgen.report.html.parts import cell, image, table
from loadgen.report.html.runs import Run, broken_flags, read_runs
from loadgen.report.html.style import title
from loadgen.report.html.tables import system_table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; } p { margin: .3rem 0; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: 13px; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #888; }
td { white-space: nowrap; } tr.set th { text-align: left; background: #f5f5f5; }
.scroll { overflow-x: auto; } img { max-width: 100%; height: auto; }
.flags { border-left: 6px solid #009E73; background: #eef8f4; padding: .6rem 1rem; }
.flags.broken { border-color: #D55E00; background: #fdf1e8; }
.flags.none { border-color: #E69F00; background: #fdf7e6; }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 12px; }
"""


def render(results: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. ConfigError if no result holds a run that measured anything."""
    runs = read_runs(results)
    if not runs and not exhibits_of(results) and not isolations_of(results):
        raise ConfigError("no result holds a run that measured anything: give the files that loadgen wrote with --out")
    body = [
        "<h1>dualpath: experiments</h1>",
        _validity(results, runs),
        *sections(results),
        _systems(runs),
        *isolation_sections(results),
        _ratios(results),
        _capacity(results),
        *_figures(runs),
        "<h2>What was run</h2>",
        *(_origin(result) for result in results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>dualpath: experiments</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _systems(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    told = "Medians over runs, least and greatest in brackets; ratios are of runs of the same repeat."
    return f"<h2>Systems</h2>\n<p>{told}</p>\n{table(*system_table(runs))}"


def _validity(results: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> str:
    said = any("validity" in one for result in results for one in (result, *(result.get("runs") or ())))
    broken = [(str(result.get("kind", "result")), flag) for result in results for flag in _of_result(result)]
    broken += [(f"{run.system}, {title(run.without())}", flag) for run in runs for flag in run.broken]
    if broken:
        items = "".join(f"<li>{escape(where)}: <strong>{escape(flag)}</strong></li>" for where, flag in broken)
        return f'<div class="flags broken"><p>Validity flags that do not hold:</p><ul>{items}</ul></div>'
    if said:
        return '<div class="flags"><p>All validity flags hold.</p></div>'
    return '<div class="flags none"><p>These results carry no validity flags.</p></div>'


def _of_result(result: Mapping[str, Any]) -> list[str]:
    """Flags of the result itself; those of one without runs are its run's, unless it measured something else."""
    return broken_flags(result.get("validity")) if result.get("runs") or result.get("isolation") else []


def _figures(runs: Sequence[Run]) -> Iterable[str]:
    """Named as in the paper."""
    jobs = "Job completion time, offline"
    drawn: list[tuple[str, Figure | None]] = [
        (f"{jobs}, by system and agents (Figure 7)", sweep_figure(runs, "agents")),
        (f"{jobs}, by max agent length (Figure 7)", sweep_figure(runs, "mal")),
        (f"{jobs}, by append length (Figure 9)", sweep_figure(runs, "append_scale")),
        (f"{jobs}, by generation length (Figure 9)", sweep_figure(runs, "generation_scale")),
        (f"{jobs}, by prefill and decode nodes (Figure 8)", sweep_figure(runs, "nodes")),
        (
            "Latency, online: mean, and p99 dotted; hollow: given up, not stationary, or not valid (Figures 10 and 11)",
            online_figure(runs),
        ),
        ("Parts of the time to first token (Figure 12)", parts_figure(runs)),
        ("Ablation: each step against Basic (Figure 12)", ablation_figure(runs)),
        ("Balance over time; dashed: mean (Figures 13 and 14)", balance_figure(runs)),
    ]
    for heading, figure in drawn:
        if figure is not None:
            yield f"<h2>{escape(heading)}</h2>"
            yield image(heading, figure)


def _ratios(results: Sequence[Mapping[str, Any]]) -> str:
    sets = []
    for result in results:
        told_already = bool(result.get("exhibits"))
        rows = []
        for name, value in ({} if told_already else result.get("ratios") or {}).items():
            values = (result.get("spreads") or {}).get(name) or [None]
            bound = (result.get("bound_ratios") or {}).get(name)
            rows.append([name, *map(cell, (value, min(values), max(values), bound))])
        if rows:
            sets.append((", ".join(filter(None, (str(result.get("kind", "")), _place(result)))), rows))
    header = ["ratio", "median", "least", "greatest", "by the formula"]
    return "<h2>Ratios</h2>\n" + table(header, sets) if sets else ""


def _place(result: Mapping[str, Any]) -> str:
    """Of a result with one place, or of the runs' first."""
    run: Mapping[str, Any] = {**next(iter(result.get("runs") or ()), {}), **result}
    return title([(name, run[name]) for name in ("model", "nodes", "mal") if name in run])


def _capacity(results: Sequence[Mapping[str, Any]]) -> str:
    """Of results that searched for it."""
    header = ["system", "met (APS)", "failed at (APS)", "formula's bound (APS)"]
    sets, rules = [], []
    for result in results:
        found = result.get("capacity") or {}
        rows = [[system, *(cell(told.get(name)) for name in _CAPACITY)] for system, told in found.items()]
        if rows:
            sets.append((_place(result), rows))
            first: Mapping[str, Any] = next(iter(result.get("runs") or ()), {})
            rules.append((first.get("verdict") or {}).get("rule", ""))
    if not sets:
        return ""
    rule = "".join(f"<p>{escape(rule)}</p>" for rule in dict.fromkeys(rules) if rule)
    return f"<h2>Capacity</h2>\n{rule}{table(header, sets)}"


_CAPACITY = ("aps", "failed_aps", "bound_aps")


def _origin(result: Mapping[str, Any]) -> str:
    """Everything but the measurements: configuration, scale, seed, versions."""
    facts = {name: value for name, value in result.items() if name not in _MEASURED}
    lines = [f"<p><strong>{escape(str(result.get('kind', 'result')))}</strong>"]
    lines += [
        f", {name} {escape(str(result[name]))}"
        for name in ("seed", "scale", "workload")
        if result.get(name) is not None
    ]
    versions = result.get("versions")
    if isinstance(versions, Mapping):
        lines += [f", {escape(str(name))} {escape(str(version))}" for name, version in versions.items()]
    shown = json.dumps(facts, indent=1, ensure_ascii=False, default=str)
    return "".join(lines) + f"</p>\n<details><summary>configuration</summary><pre>{escape(shown)}</pre></details>"


_MEASURED = frozenset(
    {
        "runs",
        "records",
        "ratios",
        "spreads",
        "bound_ratios",
        "capacity",
        "balance",
        "exhibits",
        "isolation",
        "rounds",
    }
)
