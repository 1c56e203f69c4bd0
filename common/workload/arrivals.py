"""When agents start: as a Poisson or Gamma process, or in bursts on and off (online), or all at once (offline).

Times are seconds after the start of the run, ascending, decided by the seed alone. Gaps are never clipped: clipping the
long ones would raise the rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle


def poisson_arrivals(rate: float, duration: float, seed: int) -> list[float]:
    """Arrival times in [0, duration) of a Poisson process of `rate` per second."""
    _check(rate, duration, "Poisson")
    gaps = random.Random(f"arrivals/{seed}")
    return _process(lambda: gaps.expovariate(rate), duration)


def gamma_arrivals(rate: float, duration: float, cv: float, seed: int) -> list[float]:
    """Arrival times in [0, duration) of a renewal process with Gamma gaps of mean 1 / rate.

    cv: standard deviation of a gap over its mean; 1 is Poisson, above 1 arrivals come in bursts, below 1 they are more
    even. Time 0 counts as an arrival that is not listed, so over a short run the mean count is rate * duration +
    (cv^2 - 1) / 2.
    """
    _check(rate, duration, "Gamma")
    if not cv > 0:
        raise ValueError(f"a coefficient of variation of {cv} is not above 0")
    gaps = random.Random(f"arrivals/{seed}")
    return _process(lambda: gaps.gammavariate(1 / cv**2, cv**2 / rate), duration)


def on_off_arrivals(rate: float, burst: float, period: float, duration: float, seed: int) -> list[float]:
    """Arrival times in [0, duration) of a Poisson process whose mean rate is `rate`: `burst` times as high in the first
    1 / (burst + 1) of every `period` seconds, and 1 / burst times as high in the rest."""
    _check(rate, duration, "Poisson")
    if not (burst >= 1 and period > 0):
        raise ValueError(f"bursts of {burst} times the rate in every {period} s are none")
    gaps = random.Random(f"arrivals/{seed}")
    times: list[float] = []
    start = 0.0
    expected, due = 0.0, gaps.expovariate(1.0)  # arrivals until `start`, and at which of these the next one comes
    for seconds, factor in cycle(((period / (burst + 1), burst), (period * burst / (burst + 1), 1 / burst))):
        if start >= duration:
            return times
        until = expected + min(seconds, duration - start) * rate * factor
        while due < until:
            times.append(start + (due - expected) / (rate * factor))
            due += gaps.expovariate(1.0)
        start, expected = start + seconds, until
    raise AssertionError("a cycle has no end")


def offline_arrivals(count: int) -> list[float]:
    """All agents at once."""
    return [0.0] * count


def _check(rate: float, duration: float, kind: str) -> None:
    if not (rate > 0 and duration >= 0):
        raise ValueError(f"a rate of {rate} per second over {duration} s is not a {kind} process")


def _process(gap: Callable[[], float], duration: float) -> list[float]:
    times: list[float] = []
    now = gap()
    while now < duration:
        times.append(now)
        now += gap()
    return times
