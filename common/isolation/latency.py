"""What was measured, and whether it is isolation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Isolated over idle, at most; where unisolated over idle is at least CONTENDED there was something to isolate from.
MOST_P50, MOST_P99, CONTENDED = 1.3, 2.0, 5.0
PERCENTILE_METHOD = "nearest rank"
#: With fewer samples the 99th percentile is the largest one.
ENOUGH = 100


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips of one phase: how many, and percentiles in seconds."""

    count: int
    p50_s: float
    p99_s: float

    def __str__(self) -> str:
        return f"p50 {self.p50_s * 1e6:,.0f} us, p99 {self.p99_s * 1e6:,.0f} us (n {self.count:,})"


def latency_of(round_trips_s: Sequence[float]) -> Latency:
    """ValueError for none."""
    if not round_trips_s:
        raise ValueError("no round trip was measured")
    ordered = sorted(round_trips_s)

    def percentile(p: float) -> float:
        return ordered[max(1, math.ceil(len(ordered) * p / 100)) - 1]

    return Latency(len(ordered), percentile(50), percentile(99))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A phase over another one: of the medians, of the 99th percentiles."""

    p50: float
    p99: float


def slowdown(loaded: Latency, idle: Latency) -> Slowdown:
    return Slowdown(loaded.p50_s / idle.p50_s, loaded.p99_s / idle.p99_s)


def isolates(unisolated: Slowdown, isolated: Slowdown) -> bool | None:
    """None: the bulk did not slow the small message down to begin with, so nothing is known."""
    if unisolated.p50 < CONTENDED:
        return None
    return isolated.p50 <= MOST_P50 and isolated.p99 <= MOST_P99
