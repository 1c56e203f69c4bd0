"""Results of experiments as one HTML page that needs nothing else: the paper's Figures 7 to 14 in kind, and a table.

What is read of a result (the JSON of `loadgen ... --out FILE`); whatever is missing is left out of the page. Times are
the real cluster's, in seconds: a run that was stretched has been scaled back.

result    kind       offline, online, sweep, compare, ablate, replay ...: a heading
          runs       [run]; a result without runs is one run itself; what a run lacks it has from its result
          ratios     {name: number}; spreads {name: [number]}, bound_ratios {name: number}: behind them, by the formula
          capacity   {system: {"aps", "failed_aps", "bound_aps"}}
          validity   {flag: bool, or {"ok": bool, "detail": str}}: false is shown on top of the page
          bounds     common.perf.bounds.Plan.describe()
          isolation  {phase: {"n", "p50_us", "p99_us"}}, of `loadgen bench isolation`; its ratios are
                     PHASE_over_idle_p50 and _p99; network: on what, in words
          exhibits, calibration    of `loadgen paper` (loadgen.paper.exhibit, .calibration)
          scale, workload    str: how the cluster was scaled, what was played
          the rest   (config, seed, versions ...) is shown as it is

run       system, agents, aps, repeat (runs of one repeat are paired), validity, bounds
          model, nodes ("2P4D"), mal, append_scale, generation_scale: what sweeps vary
          job_s      job completion time, all agents (offline), from the rate while all were active; makespan_s: of
                     the run as it was, which stands for job_s where not all runs of a comparison have that
          ttft_s, ttst_s, tpot_s, jct_s    {"mean", "p50", "p99"}, or the same in _ms
          ttft_parts_s   {"scheduling", "allocation", "read", "prefill"}: means
          slo        {"ttft_s", "tpot_s"}; given_up: the load was too much to go on
          verdict    {"stationary", "window_ttft_s", "window_tpot_s", "rule"}: online; the last window's go before the
                     whole run's
          balance    {"snic", "attention"}: each {"mean", "at_s": [...], "max_over_avg": [...]}; attention also
                     "rounds", its max/avg over forwards, which stands in the table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def read_results(directory: Path) -> list[dict[str, Any]]:
    """The results in a directory's *.json files, by file name. ConfigError if there are none, or one is no result."""
    results = []
    for path in sorted(directory.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"result {path}: {error}") from None
        if not isinstance(result, dict):
            raise ConfigError(f"result {path} is not a JSON object: keep other files elsewhere")
        results.append(result)
    if not results:
        raise ConfigError(f"{directory} holds no results (*.json): write them with --out")
    return results


def write_report(results: list[dict[str, Any]], out: Path) -> None:
    """Write the page. ConfigError if no result measured anything, or the file cannot be written."""
    from loadgen.report.html.page import render  # plots: nothing else needs matplotlib

    try:
        out.write_text(render(results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report {out}: {error.strerror}: give a file in a writable directory") from None
