"""How even a load was: max/avg over nodes or engines, a window at a time (spec §10). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

#: A window of the real cluster, seconds (spec §10).
WINDOW_S = 1.0
#: The part of a job over which the paper gives the balance of attention.
FIRST_SHARE = 0.05
#: A sample may come so much early, as a share of its window.
JITTER = 0.1


@dataclass(frozen=True, slots=True)
class Series:
    """Counters over time. times ascend, seconds; values[name][i] is a counter's value at times[i]."""

    times: list[float]
    values: Mapping[str, Sequence[float]]

    def increments(self) -> list[dict[str, float]]:
        """What each counter gained in each window between two times. A counter that fell, because its process started
        anew, gained what it shows."""
        windows: list[dict[str, float]] = []
        for index in range(1, len(self.times)):
            gains = {}
            for name, values in self.values.items():
                gain = values[index] - values[index - 1]
                gains[name] = gain if gain >= 0 else values[index]
            windows.append(gains)
        return windows

    def thinned(self, every: float) -> Series:
        """With windows of at least so many seconds, made of those that there are."""
        kept: list[int] = []
        for index, time in enumerate(self.times):
            if not kept or time - self.times[kept[-1]] >= every * (1 - JITTER):
                kept.append(index)
        return self._at(kept)

    def between(self, start: float, end: float) -> Series:
        """The part with times in [start, end]."""
        return self._at([index for index, time in enumerate(self.times) if start <= time <= end])

    def _at(self, kept: Sequence[int]) -> Series:
        return Series(
            [self.times[index] for index in kept],
            {name: [values[index] for index in kept] for name, values in self.values.items()},
        )


def max_over_avg(loads: Mapping[str, float]) -> float | None:
    """1 for an even load; None where there was none."""
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total > 0 else None


def mean_max_over_avg(series: Series) -> float | None:
    """Mean over windows of max/avg; windows without load say nothing. None if all are."""
    ratios = [ratio for window in series.increments() if (ratio := max_over_avg(window)) is not None]
    return fmean(ratios) if ratios else None


def overall_max_over_avg(series: Series) -> float | None:
    """max/avg of what the counters gained over the whole series."""
    if len(series.times) < 2:
        return None
    return max_over_avg({name: values[-1] - values[0] for name, values in series.values.items()})


def described(series: Series, started: float, window_s: float) -> dict[str, Any] | None:
    """For a result's JSON, over windows of window_s; None if there was no load."""
    mean = mean_max_over_avg(series)
    if mean is None:
        return None
    return {
        "mean": mean,
        "overall": overall_max_over_avg(series),
        "window_s": window_s,
        "at_s": [round(at - started, 3) for at in series.times[1:]],
        "max_over_avg": [max_over_avg(window) for window in series.increments()],
    }
