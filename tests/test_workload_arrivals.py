"""Arrivals: the processes they are said to be, decided by the seed alone."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from common.workload.arrivals import gamma_arrivals, offline_arrivals, poisson_arrivals


def test_arrivals_repeat_with_the_seed_only() -> None:
    times = poisson_arrivals(5.0, 100.0, seed=7)
    assert times == poisson_arrivals(5.0, 100.0, seed=7)
    assert times != poisson_arrivals(5.0, 100.0, seed=8)
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert poisson_arrivals(5.0, 0.0, seed=7) == []


def test_gaps_are_exponential_and_not_clipped() -> None:
    times = poisson_arrivals(20.0, 1000.0, seed=1)
    gaps = sorted(later - earlier for earlier, later in zip([0.0, *times], times, strict=False))
    n = len(gaps)
    assert abs(n - 20_000) < 4 * math.sqrt(20_000)
    assert max(gaps) > 7 / 20, "of 20,000 exponential gaps the longest is about 10 means long"
    distance = max(abs((i + 1) / n - (1 - math.exp(-20.0 * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.63 / math.sqrt(n), "Kolmogorov-Smirnov at 1 %"


@pytest.mark.parametrize(("rate", "duration"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_no_such_process(rate: float, duration: float) -> None:
    with pytest.raises(ValueError, match="not a Poisson process"):
        poisson_arrivals(rate, duration, seed=0)
    with pytest.raises(ValueError, match="not a Gamma process"):
        gamma_arrivals(rate, duration, 2.0, seed=0)


@pytest.mark.parametrize("cv", [0.0, -1.0, math.nan])
def test_no_such_variation(cv: float) -> None:
    with pytest.raises(ValueError, match="coefficient of variation"):
        gamma_arrivals(1.0, 1.0, cv, seed=0)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv: float, seed: int) -> None:
    rate, duration = 10.0, 4000.0
    times = gamma_arrivals(rate, duration, cv, seed)
    assert times == sorted(times) and times[-1] < duration
    assert times == gamma_arrivals(rate, duration, cv, seed)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    n = rate * duration
    assert abs(len(gaps) - n) < 4 * cv * math.sqrt(n), "the standard deviation of a renewal count"
    # A deviation's own relative variance is (kurtosis - 1) / 4n, and a Gamma variate's kurtosis is 3 + 6 cv^2.
    measured = pstdev(gaps) / fmean(gaps)
    assert abs(measured / cv - 1) < 4 * math.sqrt(((2 + 6 * cv**2) / 4 + cv**2) / n)


def test_a_gamma_process_of_variation_1_is_poisson() -> None:
    gaps = sorted(b - a for a, b in pairwise([0.0, *gamma_arrivals(20.0, 1000.0, 1.0, seed=4)]))
    n = len(gaps)
    distance = max(abs((i + 1) / n - (1 - math.exp(-20.0 * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.63 / math.sqrt(n), "Kolmogorov-Smirnov at 1 %"


def test_bursts_are_not_clipped() -> None:
    gaps = [b - a for a, b in pairwise([0.0, *gamma_arrivals(10.0, 4000.0, 3.0, seed=1)])]
    assert max(gaps) > 30 / 10, "gaps of shape 1/9 are longer than 30 means 4 times in 1,000"


def test_offline_everybody_starts_at_once() -> None:
    assert offline_arrivals(3) == [0.0, 0.0, 0.0]
