"""Fitting a predictor to measured times: non-negative least squares of the relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from common.perf.predictor import FitError, Fitted, Predictor

#: Which terms of a Predictor a part of a forward has, by place.
ATTENTION_TERMS = (0, 1, 2, 3)
LINEAR_TERMS = (0, 1)
FOLDS = 4

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement: seconds > 0 of `new` tokens after `cached` ones."""

    cached: int
    new: int
    seconds: float


def fit(points: Sequence[Point], terms: Sequence[int]) -> Predictor:
    """The predictor with these terms, all others 0, that is nearest to the points. ValueError without points."""
    if not points:
        raise ValueError("nothing to fit to")
    features = np.array([(1, p.new, p.cached * p.new, p.new * p.new) for p in points], dtype=float)
    seconds = np.array([p.seconds for p in points])
    rows = features / seconds[:, None]
    scale = np.where(
        rows.any(axis=0), np.abs(rows).max(axis=0), 1.0
    )  # columns of like size: the terms are powers apart
    coefficients = _non_negative(rows / scale, tuple(terms)) / scale
    return Predictor(*coefficients.tolist())


def fit_with_error(points: Sequence[Point], terms: Sequence[int]) -> Fitted:
    """Fitted to all points; the error is that of each point under a fit to the other folds. ValueError for fewer points
    than folds."""
    if len(points) < FOLDS:
        raise ValueError(f"{len(points)} points are too few to tell a fit's error")
    errors = [
        abs(predicted / point.seconds - 1) for point, predicted in zip(points, held_out(points, terms), strict=True)
    ]
    median, p95 = np.percentile(errors, [50, 95]).tolist()
    return Fitted(fit(points, terms), FitError(median, p95, len(points)))


def held_out(points: Sequence[Point], terms: Sequence[int]) -> list[float]:
    """Of each point, the seconds that a fit to the other folds predicts."""
    predicted = [0.0] * len(points)
    for fold in range(FOLDS):
        predictor = fit([point for index, point in enumerate(points) if index % FOLDS != fold], terms)
        for index in range(fold, len(points), FOLDS):
            predicted[index] = predictor.seconds(points[index].cached, points[index].new)
    return predicted


def _non_negative(rows: _Floats, terms: tuple[int, ...]) -> _Floats:
    """The x >= 0, nonzero only in `terms`, that minimises |rows x - 1|: the best of all subsets whose own least squares
    have no negative term."""
    best = np.zeros(rows.shape[1])
    least = float(len(rows))  # of x = 0
    for count in range(1, len(terms) + 1):
        for subset in combinations(terms, count):
            solution, *_ = np.linalg.lstsq(rows[:, subset], np.ones(len(rows)), rcond=None)
            residual = float(((rows[:, subset] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and residual < least:
                least = residual
                best = np.zeros(rows.shape[1])
                best[list(subset)] = solution
    return best
