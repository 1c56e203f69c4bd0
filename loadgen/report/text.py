"""What a run says to people: two tables and a few lines; and to programs: one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError

_LATENCIES = (
    ("TTFT", "ttft_ms", "ms"),
    ("TTFT from actual send", "ttft_from_send_ms", "ms"),
    ("TTST", "ttst_ms", "ms"),
    ("TPOT", "tpot_ms", "ms"),
    ("ITL", "itl_ms", "ms"),
    ("JCT of a trajectory", "jct_s", "s"),
)


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print what was measured, how the lengths were fitted, and what went wrong."""
    console.print(_latencies(result))
    console.print(_rates(result))
    for line in _facts(result):
        console.print(line, markup=False, highlight=False)


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write the result as JSON. ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"result file {path}: {error.strerror}: give a file in a writable directory") from None


def _latencies(result: dict[str, Any]) -> Table:
    table = Table(title="Latency, from the intended start of a turn", title_justify="left")
    table.add_column("measure")
    for name in ("mean", "p50", "p95", "p99", "n"):
        table.add_column(name, justify="right")
    for title, key, unit in _LATENCIES:
        values = result[key]
        last = "*" if values["few_samples"] and values["n"] else ""
        cells = [number(values[name]) for name in ("mean", "p50", "p95", "p99")]
        table.add_row(f"{title} [{unit}]".replace("[", r"\["), *cells[:3], cells[3] + last, str(values["n"]))
    table.caption = f"percentiles: {result['percentile_method']}; * fewer than 100 values, so p99 is the largest"
    return table


def _rates(result: dict[str, Any]) -> Table:
    table = Table(title="Rates", title_justify="left")
    for name in ("window", "from s", "to s", "ended/s", "well/s", "good/s", "tokens/s"):
        table.add_column(name, justify="left" if name == "window" else "right")
    for name in ("whole", "steady"):
        window = result["rates"][name]
        cells = [number(value) for value in window.values()] if window else ["-"] * 6
        table.add_row(name, *cells)
    slo = result["slo"]
    table.caption = (
        f"steady: from the first trajectory's end to the last one's start; good: ended well with TTFT <= "
        f"{slo['ttft_s']:g} s and TPOT <= {slo['tpot_s'] * 1e3:g} ms"
    )
    return table


def _facts(result: dict[str, Any]) -> list[str]:
    scaling = result["scaling"]
    hit, prompt = result["hit_tokens"], result["prompt_tokens"]
    share = f" ({100 * hit / prompt:.1f} % of the prompts)" if hit is not None and prompt else ""
    factors = sorted(set(scaling["factors"].values()))
    if factors == [1]:
        lengths = "native"
    else:
        lengths = f"divided by {factors[0]}" if len(factors) == 1 else f"divided by {factors[0]} to {factors[-1]}"
    lines = [
        f"turns: {result['offered']} offered, {result['attempted']} attempted, {result['turns']} ended well, "
        f"{result['failed']} failed, {result['unfinished']} unfinished, {result['violations']} with violations",
        f"trajectories: {result['trajectories']['completed']} completed, {result['trajectories']['failed']} failed",
        f"tokens: {prompt} prompt, {'unknown' if hit is None else hit} hit{share}, "
        f"{'unknown' if hit is None else result['computed_tokens']} computed, {result['generated_tokens']} generated",
        f"lengths: {lengths}; {scaling['sessions']} sessions, longest context {scaling['longest_context']} tokens, "
        f"{scaling['cut_turns']} turns of {scaling['cut_sessions']} sessions cut at the model's limit of "
        f"{scaling['model_limit']}, {scaling['dropped_sessions']} sessions dropped",
    ]
    if result["interrupted"]:
        lines.append("interrupted: this is what was measured until then")
    return lines + [f"problem: {problem}" for problem in result["problems"]]


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
