"""Arrivals of agents in an open loop."""

from __future__ import annotations

import random


def poisson_arrivals(rate: float, duration: float, seed: int) -> list[float]:
    """Arrival times in [0, duration) seconds of a Poisson process of `rate` per second, ascending.

    Gaps are exponential and not clipped: clipping the long ones would raise the rate.
    """
    if rate <= 0 or duration < 0:
        raise ValueError(f"a rate of {rate} per second over {duration} s is not a Poisson process")
    gaps = random.Random(f"arrivals/{seed}")
    times: list[float] = []
    now = gaps.expovariate(rate)
    while now < duration:
        times.append(now)
        now += gaps.expovariate(rate)
    return times
