"""The demo, with a tiny model, and one process alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcher import demo
from tests.launch_harness import launched
from tests.models import tiny_model


def test_demo(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    small = ["--max-sessions", "3", "--max-turns", "4", "--max-context", "600", "--agents", "3"]
    with launched(tmp_path / "run", "demo", "--model", str(model), *small, "--out", "results.json") as run:
        assert run.wait(120) == 0, run.stderr
        assert run.left_behind() == ({}, [])
        assert "turns equal to transformers" in run.stdout
    results = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert [row["system"] for row in results] == ["pe-only", "dualpath"]
    pe_only, dualpath = results
    for row in results:
        assert row["turns"] == row["turns_equal"] == 12
        assert row["hit_tokens"] > 0 and row["hit_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        assert set(row["read_bytes"]) == {"prefill-0", "decode-0", "decode-1"}
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
    assert pe_only["hit_tokens"] == dualpath["hit_tokens"]
    bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
    assert sum(pe_only["read_bytes"].values()) == pe_only["read_bytes"]["prefill-0"]
    for row in results:
        assert sum(row["read_bytes"].values()) == row["hit_tokens"] * bytes_per_token
    assert sum(node > 0 for node in dualpath["read_bytes"].values()) > 1


REPORT: dict[str, Any] = {
    "results": [
        {
            "system": "pe-only",
            "turns": 5,
            "failed": 0,
            "turns_equal": 5,
            "hit_tokens": 0,
            "computed_tokens": 1234,
            "read_bytes": {"prefill-0": 2_000_000},
            **{name: {"p50": 1.0, "p99": 2.0} for name in ("ttft_ms", "ttst_ms", "tpot_ms")},
            "jct_s": {"mean": None},
        }
    ],
    "mismatches": [],
    "facts": {
        "model": "m",
        "engines": "1 prefill, 2 decode",
        "cores": 2,
        "sessions": "s.jsonl",
        "agents": 2,
        "transport": "auto",
        "dtype": "float32",
        "scaling": {"sessions": 1, "max_context": 900, "factors": {"a": 1}},
    },
}


@pytest.mark.parametrize(("change", "ok"), [({}, True), ({"turns_equal": 4}, False), ({"failed": 1}, False)])
def test_a_turn_that_is_not_equal_or_failed_fails_the_demo(change: dict[str, int], ok: bool) -> None:
    report = {**REPORT, "results": [{**REPORT["results"][0], **change}]}
    assert demo.passed(report) is ok


def test_a_mismatch_is_shown() -> None:
    mismatch = {"system": "dualpath", "session": "s1", "turn": 2, "index": 7, "expected": 5, "got": 9, "gap": 0.25}
    lines = demo.findings({**REPORT, "mismatches": [mismatch]})
    assert lines[-1] == (
        "NOT EQUAL: dualpath, session s1, turn 2, output token 7: 9 instead of 5 (logits differ by 0.25)"
    )


def test_serve_one_process_alone(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[log]\nformat = 'json'\n")
    with launched(tmp_path / "run", "serve", "scheduler", "--config", str(file), "--name", "s0") as run:
        run.until(lambda: _listens(run.process.pid))
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0
        assert run.left_behind() == ({}, [])


def _listens(pid: int) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in psutil.Process(pid).net_connections("tcp"))
