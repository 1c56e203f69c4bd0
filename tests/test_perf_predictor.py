"""Fitted predictors: what a fit finds, what its error says, and files that fit nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.perf.fit import ATTENTION_TERMS, LINEAR_TERMS, Point, fit, fit_with_error, held_out
from common.perf.predictor import FitError, Fitted, Identity, Predictor, Profile, load_profile
from common.perf.thresholds import Thresholds

GRID = list(product([0, 256, 512, 1024, 2048, 4096], [16, 64, 128, 256, 512]))
IDENTITY = Identity("digest", "cpu", "float32", 2)


def points_of(predictor: Predictor) -> list[Point]:
    return [Point(cached, new, predictor.seconds(cached, new)) for cached, new in GRID]


def test_a_predicted_time():
    """0.5 + 0.01 x 20 + 0.002 x 300 x 20 + 0.0001 x 400 = 0.5 + 0.2 + 12 + 0.04."""
    assert Predictor(0.5, 0.01, 0.002, 0.0001).seconds(300, 20) == pytest.approx(12.74)


coefficient = st.one_of(st.just(0.0), st.floats(0.1, 10))


@given(coefficient, st.floats(0.1, 10), coefficient, coefficient)
def test_a_fit_finds_the_terms_that_made_the_points(base, new, pair, square):
    """Each scaled so that it matters somewhere on the grid."""
    true = Predictor(base * 1e-3, new * 1e-5, pair * 1e-8, square * 1e-8)
    found = fit(points_of(true), ATTENTION_TERMS)
    for point in points_of(true):
        assert found.seconds(point.cached, point.new) == pytest.approx(point.seconds, rel=1e-4)


@given(st.lists(st.floats(0.5, 2.0), min_size=len(GRID), max_size=len(GRID)))
def test_noise_never_makes_a_time_fall(noise):
    true = Predictor(1e-3, 1e-5, 1e-8, 1e-8)
    noisy = [replace(point, seconds=point.seconds * n) for point, n in zip(points_of(true), noise, strict=True)]
    assert min(asdict(fit(noisy, ATTENTION_TERMS)).values()) >= 0


def test_linear_terms_know_nothing_of_the_cache():
    found = fit([Point(cached, new, 0.1 + 0.001 * new) for cached, new in GRID], LINEAR_TERMS)
    assert found.base_s == pytest.approx(0.1)
    assert found.per_new_s == pytest.approx(0.001)
    assert (found.per_cached_new_s, found.per_new_squared_s) == (0, 0)


def test_the_error_is_that_of_points_which_the_fit_has_not_seen():
    """One point is ten times too slow: a fit that has not seen it predicts its true time all the same."""
    points = points_of(Predictor(1e-3, 1e-5, 1e-8, 1e-8))
    exact = fit_with_error(points, ATTENTION_TERMS)
    assert exact.error.p95 < 1e-6
    true_s = points[13].seconds
    points[13] = replace(points[13], seconds=10 * true_s)
    assert held_out(points, ATTENTION_TERMS)[13] == pytest.approx(true_s, rel=1e-3)
    assert fit_with_error(points, ATTENTION_TERMS).error.points == len(GRID)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="too few"):
        fit_with_error([Point(0, 1, 1.0)] * 3, LINEAR_TERMS)
    with pytest.raises(ValueError, match="nothing"):
        fit([], LINEAR_TERMS)


def profile() -> Profile:
    fitted = Fitted(Predictor(1e-3, 1e-5, 1e-8, 2e-8), FitError(0.05, 0.2, 30))
    return Profile(IDENTITY, fitted, fitted, Thresholds(1000, 2000), {"read_bytes_per_s": 1e9})


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path):
    path = tmp_path / "profile.json"
    profile().save(path)
    assert load_profile(path, IDENTITY) == profile()


@pytest.mark.parametrize(
    ("field", "other"),
    [("model_digest", "another"), ("device", "cuda"), ("dtype", "bfloat16"), ("threads", 4), ("layout", "two devices")],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, field: str, other: object):
    path = tmp_path / "profile.json"
    profile().save(path)
    with pytest.raises(ConfigError, match=f"is for {field} .*not {other!r}.*dualpath profile"):
        load_profile(path, replace(IDENTITY, **{field: other}))


def damaged(**changes: object) -> str:
    content = {**asdict(profile()), **changes}
    return json.dumps(content)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "no json", damaged(format="dualpath profile 2"), damaged(attention=None), damaged(more=1)],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"is no profile: make one"):
        load_profile(path, IDENTITY)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.json: No such file.*dualpath profile"):
        load_profile(tmp_path / "nothing.json", IDENTITY)
    with pytest.raises(ConfigError, match="No such file"):
        profile().save(tmp_path / "no" / "directory.json")
