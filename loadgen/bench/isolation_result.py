"""What `loadgen bench isolation` says: latencies by phase, ratios round by round, whether that is isolation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from common.isolation.latency import (
    CONTENDED,
    ENOUGH,
    MOST_P50,
    MOST_P99,
    PERCENTILE_METHOD,
    Latency,
    Slowdown,
    isolates,
    slowdown,
)

IDLE = "idle"
#: The phases of each case: without classes, and with them.
CASES = {"isolation": ("unisolated", "isolated"), "isolation under incast": ("incast_unisolated", "incast_isolated")}


def result_of(rounds: Sequence[Mapping[str, Latency]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The result as JSON. Every ratio is one of a round, against the idle phase of the same one; the median counts."""
    names = list(rounds[0])
    spreads: dict[str, list[float]] = {}
    for name in names:
        if name != IDLE:
            slower = [slowdown(measured[name], measured[IDLE]) for measured in rounds]
            spreads[f"{name}_over_idle_p50"] = [one.p50 for one in slower]
            spreads[f"{name}_over_idle_p99"] = [one.p99 for one in slower]
    ratios = {name: median(values) for name, values in spreads.items()}
    return {
        "kind": "isolation",
        **settings,
        "percentile_method": PERCENTILE_METHOD,
        "isolation": {
            name: {
                "n": sum(measured[name].count for measured in rounds),
                "p50_us": median(measured[name].p50_s for measured in rounds) * 1e6,
                "p99_us": median(measured[name].p99_s for measured in rounds) * 1e6,
            }
            for name in names
        },
        "rounds": [
            {
                name: {"n": one.count, "p50_us": one.p50_s * 1e6, "p99_us": one.p99_s * 1e6}
                for name, one in measured.items()
            }
            for measured in rounds
        ],
        "ratios": ratios,
        "spreads": spreads,
        "validity": {**_judged(ratios), **_enough(rounds)},
    }


def _judged(ratios: Mapping[str, float]) -> dict[str, Any]:
    flags = {}
    for case, (without, with_) in CASES.items():
        if f"{with_}_over_idle_p50" not in ratios:
            continue
        loaded, isolated = (_slowdown(ratios, name) for name in (without, with_))
        holds = isolates(loaded, isolated)
        told = (
            f"{isolated.p50:.2f} x idle at p50 (at most {MOST_P50}), {isolated.p99:.2f} x at p99 (at most {MOST_P99})"
        )
        if holds is None:
            told = f"without classes p50 is {loaded.p50:.1f} x idle, less than {CONTENDED}: there was no contention"
        flags[case] = {"ok": bool(holds), "detail": told}
    return flags


def _slowdown(ratios: Mapping[str, float], name: str) -> Slowdown:
    return Slowdown(ratios[f"{name}_over_idle_p50"], ratios[f"{name}_over_idle_p99"])


def _enough(rounds: Sequence[Mapping[str, Latency]]) -> dict[str, Any]:
    least = min(one.count for measured in rounds for one in measured.values())
    return {"samples": {"ok": least >= ENOUGH, "detail": f"{least} in the shortest phase; p99 needs {ENOUGH}"}}
