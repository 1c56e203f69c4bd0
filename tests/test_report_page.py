"""The HTML report in a real browser: every plot is loaded, drawn and on the page. Needs Debian's package chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.report.html import write_report
from tests.browser import look

pytestmark = pytest.mark.pictures


def results() -> list[dict[str, Any]]:
    place = {"model": "ds-660b", "nodes": "2P4D", "agents": 64}
    times = {"basic": 200.0, "dualpath": 100.0, "oracle": 80.0}
    series = {"mean": 1.1, "at_s": [1, 2, 3], "max_over_avg": [1.2, None, 1.0]}
    jobs = [{"system": name, "repeat": 0, "job_s": job_s} for name, job_s in times.items()]
    jobs[0] |= {"balance": {"snic": series, "attention": None}, "ttft_parts_s": {"read": 1.0, "prefill": 0.5}}
    latency = {"mean": 0.1, "p50": 0.1, "p99": 0.2}
    loads = [{"system": name, "aps": aps, "ttft_s": latency, "tpot_s": latency} for name in times for aps in (0.1, 0.2)]
    return [{"kind": "compare", **place, "runs": jobs}, {"kind": "online", **place, "runs": loads}]


def test_a_browser_shows_every_plot(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(results(), page)
    plots = look(page, tmp_path)
    assert len(plots) == page.read_text().count("<img ") >= 4
    assert sum("Figure" in plot["alt"] for plot in plots) >= 4
    for plot in plots:
        assert plot["natural"] > 300 and plot["shown"] > 300, plot
        assert 0.005 < plot["drawn"] < 0.9, f"blank, or all of one colour: {plot}"
