"""The paper's numbers beside ours: what needs no simulation, and how differences are counted."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from loadgen.paper.calibration import CALIBRATIONS, DEFAULT, Calibration
from loadgen.paper.cases import Case, Runner
from loadgen.paper.exhibit import Exhibit, Row, heldout_errors, ratios, unexplained
from loadgen.paper.figure3 import figure3
from loadgen.paper.fitting import RUNS, TOLERANCE, solve
from loadgen.paper.online import largest_of_rates, largest_rate, working_set_bytes
from loadgen.paper.published import PUBLISHED, Role
from loadgen.paper.scale import rate_at
from loadgen.paper.table1 import MODELS, cache_to_compute, table1
from loadgen.paper.table2 import table2
from loadgen.paper.tables import print_calibration


def value(exhibit: Exhibit, name: str) -> float:
    [row] = [row for row in exhibit.rows if row.name == name]
    assert row.ours is not None
    return row.ours


def test_v32_at_the_mean_context_by_hand() -> None:
    """32,721 tokens x 61 layers x 656 bytes = 1.309 GB. 429 new ones: 2 x 37e9 x 429 = 31.75 TFLOP of linear layers;
    a layer's heads see 2,048 positions each: 61 x 2 x 128 x 1,088 x 429 x 2,048 = 14.93; the indexer all:
    61 x 2 x 64 x 128 x 429 x (32,721 + 429 / 2) = 14.12 TFLOP. Together 60.8: 21.5 GB a PFLOP."""
    by_hand = 1.30936 / (31.746 + 14.928 + 14.122) * 1e3
    assert value(table1(), "cache_to_compute_ds-v3.2_32.7k") == pytest.approx(by_hand, rel=1e-3)


def test_qwen_by_hand() -> None:
    """16,384 tokens x 262,144 bytes = 4.295 GB; 2 x 32e9 x 429 = 27.46 and 64 x 4 x 40 x 128 x 429 x (16,384 + 214.5)
    = 9.33 TFLOP: 116.7."""
    assert cache_to_compute(MODELS[0], 16_384) == pytest.approx(4294.97 / (27.456 + 9.3335), rel=1e-3)


def test_table_1_is_near_everywhere() -> None:
    for row in table1().rows:
        assert row.role is Role.FITTED
        limit = 12 if row.name.startswith("cache_to_compute_ds-v3_") else 7
        assert row.difference_percent is not None and abs(row.difference_percent) < limit, row


def test_the_hardware_trend() -> None:
    """A100 25 GB/s over 312 TFLOP/s, B200 50 GB/s over 9 PFLOP/s: 14.42."""
    assert value(figure3(), "io_to_compute_ampere_over_blackwell") == pytest.approx((25 / 312) / (50 / 9000))
    trend, throughput = figure3().panels
    assert [line.name for line in trend.lines] == ["NIC to compute", "HBM to compute"]
    for line in throughput.lines:
        assert list(line.y) == sorted(line.y), "larger batches are never slower a token"  # type: ignore[type-var]


def test_table_2_names_every_column_of_every_set() -> None:
    rows = table2().rows
    assert len(rows) == 18 and all(row.published for row in rows)
    assert max(abs(row.difference_percent or 0) for row in rows) < 1


def test_only_held_out_numbers_count() -> None:
    exhibit = Exhibit(
        "x",
        "",
        [
            Row("jct_s_2p4d", "", "s", 3167 * 1.5),  # fitted
            Row("speedup_660b_max", "", "x", 1.87 * 1.1),
            Row("speedup_27b_max", "", "x", 1.78 * 0.7),
            Row("speedup_27b_pd_max", "", "x", None),
            Row("something_else", "", "x", 3.0),
        ],
    )
    assert heldout_errors(exhibit.rows) == pytest.approx({"speedup_660b_max": 0.1, "speedup_27b_max": 0.3})
    flat = ratios([exhibit])
    assert flat["heldout_median_error"] == pytest.approx(0.2) and flat["heldout_max_error"] == pytest.approx(0.3)
    assert flat["heldout_count"] == 2 and flat["heldout_unexplained"] == 1
    assert flat["something_else"] == 3.0 and "speedup_27b_pd_max" not in flat
    assert unexplained(exhibit.rows) == ["speedup_27b_max"]
    assert unexplained([Row("speedup_27b_max", "", "x", 1.0, why="a reason")]) == []


def test_what_has_no_published_number_says_so() -> None:
    told = Row("policy_share", "", "", 0.2).describe()
    assert told["published"] is None and told["difference_percent"] is None and told["role"] == "none"


def test_calibrations_name_what_they_were_fitted_to_and_touch_no_default() -> None:
    for calibration in CALIBRATIONS.values():
        assert calibration.fitted_to and all(PUBLISHED[name].role is Role.FITTED for name in calibration.fitted_to)
    faster = Calibration("x", prefill=2.0).hardware.efficiency
    assert faster.linear_experts == 2 * DEFAULT.linear_experts and faster.indexer == 2 * DEFAULT.indexer
    assert faster.prefill_gqa == DEFAULT.prefill_gqa and faster.hbm == DEFAULT.hbm
    assert Calibration("x").hardware.efficiency == DEFAULT


def test_working_set_of_the_paper() -> None:
    """0.1 agents/s x 616 s x 55,958 x 40,016 bytes / 2 = 69 GB."""
    assert working_set_bytes(0.1, 616, 55_958 * 40_016) == pytest.approx(69e9, rel=1e-2)


@pytest.mark.parametrize("capacity", [0.07, 0.45, 3.0])
def test_the_search_finds_the_largest_rate(capacity: float) -> None:
    found = largest_rate(0.2, lambda aps: aps <= capacity)
    assert found is not None and capacity / 1.035 <= found <= capacity
    assert largest_rate(0.2, lambda aps: False) is None


@pytest.mark.parametrize(("capacity", "found"), [(0.05, None), (0.25, 0.2), (3.0, 0.45)])
def test_the_largest_of_the_rates_that_are_plotted(capacity: float, found: float | None) -> None:
    class Told(Runner):
        def run(self, case: Case) -> dict[str, Any]:
            ttft_s = 1.0 if case.aps <= capacity else 9.0
            return {"verdict": {"window_ttft_s": {"mean": ttft_s}, "stationary": True}, "token_s": 0.04}

    assert largest_of_rates(Told(), Case("basic")) == found


@pytest.mark.parametrize("rate", [0.35, 0.399, 0.4, 0.41, 0.48])
def test_a_rate_of_like_latency_is_interpolated(rate: float) -> None:
    measured = []

    def measure(aps: float) -> float:
        measured.append(aps)
        return float(1.7 * (aps / rate) ** 6)

    assert rate_at(1.7, 0.4, measure) == pytest.approx(rate) and len(measured) <= 5
    assert rate_at(1.7, 0.4, lambda aps: 5.0) is None


@pytest.mark.parametrize("power", [-2.0, -0.5, 0.3, 1.0])
def test_a_constant_is_found_by_secants(power: float) -> None:
    measured = []

    def measure(x: float) -> float:
        measured.append(x)
        return 10 * x**power + 1

    found = solve(1.0, 14.0, measure)
    assert 10 * found**power + 1 == pytest.approx(14, rel=TOLERANCE) and len(measured) <= RUNS
    assert solve(2.0, 14.0, lambda x: 14.0) == 2.0


def test_what_was_fitted_is_printed_beside_what_it_was() -> None:
    console = Console(width=160, record=True, file=StringIO())
    print_calibration(console)
    text = console.export_text()
    for calibration in CALIBRATIONS.values():
        for name, values in calibration.describe()["constants"].items():
            [line] = [line for line in text.splitlines() if calibration.name in line and f" {name} " in line]
            assert f"{values['fitted']:.4g}" in line and calibration.fitted_to[0] in line
    assert " - " in text, "reserve_bytes has no default"
