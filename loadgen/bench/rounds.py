"""Rounds: every way has its turn in each, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from loadgen.bench.pair import Measured

Turn = Callable[[], Awaitable[Measured]]


async def interleaved(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Measured]]:
    """What each of them measured, round by round; in each round they go in another order."""
    chance = random.Random(0)
    measured: dict[str, list[Measured]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in chance.sample(list(turns), len(turns)):
            measured[name].append(await turns[name]())
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high}


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> dict[str, float]:
    """Our rate over theirs, round by round."""
    return spread([own.gib_per_s / other.gib_per_s for own, other in zip(ours, theirs, strict=True)])


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Rates and CPU time of one way."""
    active, passive = zip(*(one.cpu_per_gib() for one in measured), strict=True)
    return {
        "gib_per_s": spread([one.gib_per_s for one in measured]),
        "cpu_s_per_gib": {"active": statistics.median(active), "passive": statistics.median(passive)},
    }
