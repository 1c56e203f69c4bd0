"""Rounds: every way has its turn in each, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from loadgen.bench.pair import Measured

#: Fewer say nothing.
MIN_ROUNDS = 3

Turn = Callable[[], Awaitable[Measured]]


async def interleaved(
    turns: Mapping[str, Turn], rounds: int, on_failure: Callable[[str, ConfigError], None]
) -> dict[str, list[Measured]]:
    """What each of them measured, round by round; in each round they go in another order. on_failure is told of one
    that fails, and may raise; if it does not, that one has no further turns."""
    chance = random.Random(0)
    left = dict(turns)
    measured: dict[str, list[Measured]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in chance.sample(list(left), len(left)):
            try:
                measured[name].append(await left[name]())
            except ConfigError as error:
                on_failure(name, error)
                del left[name]
    return {name: values for name, values in measured.items() if len(values) >= MIN_ROUNDS}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high}


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> dict[str, float]:
    """Our rate over theirs, round by round, as far as both have them; best: of each one's least disturbed round."""
    found = spread([own.gib_per_s / other.gib_per_s for own, other in zip(ours, theirs, strict=False)])
    best = [max(one.gib_per_s for one in measured) for measured in (ours, theirs)]
    return {**found, "best": best[0] / best[1]}


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Rates and CPU time of one way."""
    active, passive = zip(*(one.cpu_per_gib() for one in measured), strict=True)
    return {
        "gib_per_s": spread([one.gib_per_s for one in measured]),
        "cpu_s_per_gib": {"active": statistics.median(active), "passive": statistics.median(passive)},
    }
