"""Measures from known times (cases E04, E05, E14, E15)."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measures.turns import (
    RunLog,
    Slo,
    TrajectoryRecord,
    TurnRecord,
    measure,
    percentile,
    rows,
    steady_window,
    summary,
)


def turn(times: list[float], intended: float = 0.0, requested: int | None = None, **more: object) -> TurnRecord:
    ended = times[-1] if times else intended
    record = TurnRecord("s", 0, intended, intended, ended, 100, requested or len(times), times, cached_tokens=64)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def log(turns: list[TurnRecord], start: float = 0.0, end: float = 10.0) -> RunLog:
    return RunLog(offered=len(turns), started=start, ended=end, attempted=len(turns), turns=turns)


def test_definitions() -> None:
    result = measure(log([turn([5.0, 5.5, 5.6, 5.8], intended=3.0, started=4.0)]), Slo())
    assert result["ttft_ms"]["p50"] == 2000.0, "from the intended start"
    assert result["ttft_from_send_ms"]["p50"] == 1000.0
    assert result["ttst_ms"]["p50"] == 500.0
    assert result["tpot_ms"]["p50"] == pytest.approx(800 / 3)
    assert result["itl_ms"]["n"] == 3
    assert result["itl_ms"]["p99"] == 500.0
    assert (result["prompt_tokens"], result["hit_tokens"], result["computed_tokens"]) == (100, 64, 36)
    assert result["generated_tokens"] == 4


def test_e04_few_tokens_and_no_duration() -> None:
    turns = [turn([1.0]), turn([1.0, 1.1]), turn([], requested=5, failure="no_tokens")]
    result = measure(log(turns, start=2.0, end=2.0), Slo())
    text = json.dumps(result, allow_nan=False)
    assert "NaN" not in text
    assert "Infinity" not in text
    assert (result["tpot_ms"]["n"], result["tpot_ms"]["excluded"]) == (1, 1)
    assert (result["turns"], result["failed"]) == (2, 1)
    assert result["goodput_rps"] is None
    nothing = measure(log([]), Slo())
    json.dumps(nothing, allow_nan=False)
    assert nothing["ttft_ms"]["p99"] is None


def test_e05_tpot_counts_the_tokens_that_came() -> None:
    early = turn([1.0 + 0.1 * i for i in range(10)], requested=100, violations=["generated 10 tokens instead of 100"])
    result = measure(log([early]), Slo(tpot_s=1.0))
    assert result["tpot_ms"]["p50"] == pytest.approx(100.0)
    assert (result["turns"], result["violations"]) == (1, 1)
    assert result["goodput_rps"] == 0.0, "the wrong length is not good"


def test_e15_percentiles() -> None:
    assert summary([10, 20, 30])["p99"] == 30
    assert summary([10, 20, 30])["p50"] == 20
    assert summary([30, 10, 20])["few_samples"] is True
    assert summary(range(1, 21))["p95"] == 19
    assert summary(range(1, 101))["p99"] == 99
    assert summary(range(1, 101))["few_samples"] is False
    assert summary([]) == {
        "p50": None, "p95": None, "p99": None, "mean": None, "n": 0, "excluded": 0, "few_samples": True,
    }
    assert measure(log([]), Slo())["percentile_method"] == "nearest-rank"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.sampled_from([50, 95, 99]))
def test_percentile_is_the_smallest_value_with_enough_below_it(values: list[float], p: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, p)
    assert found in ordered
    enough = math.ceil(p / 100 * len(ordered))
    assert sum(value <= found for value in ordered) >= enough
    assert sum(value < found for value in ordered) < enough


def test_goodput_counts_what_meets_both_objectives() -> None:
    turns = [
        turn([3.9, 3.9 + 0.05]),
        turn([4.1, 4.11]),
        turn([1.0, 1.06]),
        turn([1.0]),
        turn([1.0, 1.01], failure="truncated"),
    ]
    assert measure(log(turns), Slo())["goodput_rps"] == 0.2
    assert measure(log(turns), Slo(ttft_s=5.0, tpot_s=0.1))["goodput_rps"] == 0.4


def test_failures_are_kept_apart() -> None:
    turns = [turn([1.0, 1.1]), turn([0.001], failure="error_event", detail="boom"), turn([], failure="connection")]
    run = log(turns)
    run.offered, run.attempted = 9, 5
    result = measure(run, Slo())
    assert (result["offered"], result["attempted"], result["turns"], result["failed"]) == (9, 5, 1, 2)
    assert result["unfinished"] == 2
    assert result["failures"] == {"error_event": 1, "connection": 1}
    assert result["ttft_ms"]["n"] == 1
    assert "error_event: boom" in result["problems"][0]


def test_unknown_hits_are_not_zero() -> None:
    result = measure(log([turn([1.0], cached_tokens=None), turn([1.0])]), Slo())
    assert result["hit_tokens"] is None
    assert result["computed_tokens"] is None


def steady_log() -> RunLog:
    """10 turns a second for 60 s, after a ramp of 2 s, and a drain of 3 s with one turn."""
    ends = [2.0 + 0.1 * i for i in range(601)] + [65.0]
    run = log([turn([end - 0.05, end], intended=end - 1.0) for end in ends], end=65.0)
    run.trajectories = [TrajectoryRecord("s", end - 1.0, end, True) for end in ends]
    run.last_start = 62.0
    return run


def test_e14_ramp_and_drain_are_not_in_the_steady_rate() -> None:
    result = measure(steady_log(), Slo())
    steady, whole = result["rates"]["steady"], result["rates"]["whole"]
    assert (steady["from_s"], steady["to_s"]) == (2.0, 62.0)
    assert steady["completed_rps"] == pytest.approx(10.0, rel=0.02)
    assert whole["completed_rps"] == pytest.approx(602 / 65)
    assert (whole["from_s"], whole["to_s"]) == (0.0, 65.0)


def test_a_short_run_has_no_steady_window() -> None:
    run = steady_log()
    run.last_start = 1.0
    assert steady_window(run) is None
    assert measure(run, Slo())["rates"]["steady"] is None
    run.last_start = None
    assert steady_window(run) is None
    assert steady_window(log([])) is None


def test_a_failed_trajectory_does_not_end_the_ramp() -> None:
    run = steady_log()
    run.trajectories.append(TrajectoryRecord("s", 0.0, 0.5, False))
    assert steady_window(run) == (2.0, 62.0)


def test_jct_ends_at_the_last_token_of_completed_trajectories() -> None:
    run = log([turn([1.0])])
    run.trajectories = [TrajectoryRecord("a", 1.0, 4.0, True), TrajectoryRecord("b", 1.0, 2.0, False)]
    result = measure(run, Slo())
    assert (result["jct_s"]["mean"], result["jct_s"]["n"]) == (3.0, 1)
    assert result["trajectories"] == {"completed": 1, "failed": 1}


def test_rows_have_intended_and_actual_times() -> None:
    (row,) = rows(log([turn([5.0, 5.5], intended=3.0, started=4.0)], start=1.0))
    assert (row["intended_s"], row["started_s"], row["first_token_s"], row["last_token_s"]) == (2.0, 3.0, 4.0, 4.5)
