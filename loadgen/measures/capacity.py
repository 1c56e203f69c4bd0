"""The largest rate of agents that a system serves within its objectives. Pure: the search, and what a run says.

A run meets the objectives if, over the turns that were due in its last window (the last third of the arrivals; the
paper's is the last 150 s), TTFT meets its own at the 99th percentile and the mean TPOT meets its own, and if it was
stationary: mean TTFT did not rise from the window before to the last one by more than RISE of it and RISE_SHARE of its
objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.measures.turns import RunLog, Slo, TurnRecord, summary

WINDOW_SHARE = 1 / 3
RISE, RISE_SHARE = 0.25, 0.1
PERCENTILE = 99
#: Between the first rates that are tried.
STEP = 1.4

RULE = (
    f"met: p{PERCENTILE} of TTFT and mean TPOT of the turns due in the last third of the arrivals are within the "
    f"objectives, and mean TTFT rose from the third before by at most {RISE:.0%} and {RISE_SHARE:.0%} of the objective"
)


@dataclass
class Search:
    """Bisects for the largest rate that meets the objectives, on a logarithmic scale, from `rate` on, until met and
    failed are within tolerance of one another or trials are used up.

    rate: what to try next. met: the largest rate that did, failed: the least that did not (of those above met).
    """

    rate: float
    tolerance: float = 0.05
    trials: int = 8
    met: float | None = None
    failed: float | None = None
    tried: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        if len(self.tried) >= self.trials:
            return True
        return self.met is not None and self.failed is not None and self.failed <= self.met * (1 + self.tolerance)

    def tell(self, met: bool) -> None:
        """What the run at `rate` said."""
        self.tried.append((self.rate, met))
        if met:
            self.met = self.rate
        else:
            self.failed = self.rate
        if self.met is None:
            self.rate /= STEP
        elif self.failed is None:
            self.rate *= STEP
        else:
            self.rate = math.sqrt(self.met * self.failed)


def verdict(log: RunLog, slo: Slo, given_up: bool) -> dict[str, Any]:
    """What an online run says about its rate; given_up: it was stopped because it had failed already."""
    before, last = last_windows(log)
    ttft = summary(turn.ttft for turn in last)
    tpot = summary(turn.tpot for turn in last)
    stationary = is_stationary(before, last, slo)
    within = (
        not given_up
        and _within(ttft[f"p{PERCENTILE}"], slo.ttft_s)
        and _within(tpot["mean"], slo.tpot_s)
        and not any(turn.failure for turn in last)
    )
    return {
        "window_ttft_s": ttft,
        "window_tpot_s": tpot,
        "stationary": stationary,
        "within_slo": within,
        "met": within and stationary,
        "rule": RULE,
    }


def last_windows(log: RunLog) -> tuple[list[TurnRecord], list[TurnRecord]]:
    """The turns that were due in the last window and in the one before, those that were cut at the end included."""
    end = log.ended if log.last_start is None else log.last_start
    length = (end - log.started) * WINDOW_SHARE
    turns = [*log.turns, *log.cut]
    return (
        [turn for turn in turns if end - 2 * length < turn.intended <= end - length],
        [turn for turn in turns if end - length < turn.intended <= end],
    )


def rises(before_s: float, last_s: float, slo: Slo) -> bool:
    """Of the mean TTFT of two windows, one after the other: more than chance and bursts make it. What is small beside
    the objective says nothing of queues that grow."""
    return last_s > before_s * (1 + RISE) + RISE_SHARE * slo.ttft_s


def is_stationary(before: Sequence[TurnRecord], last: Sequence[TurnRecord], slo: Slo) -> bool:
    """False, too, for windows without turns, or with one that has no first token."""
    means = [summary(turn.ttft for turn in window) for window in (before, last)]
    if any(not mean["n"] or mean["excluded"] for mean in means):
        return False
    return not rises(means[0]["mean"], means[1]["mean"], slo)


def _within(value: float | None, objective: float) -> bool:
    return value is not None and value <= objective
