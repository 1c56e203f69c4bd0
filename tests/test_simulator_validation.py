"""Live clusters against their simulation. Minutes each, and only worth something on a host with nothing else to do:

pytest -m validation -s tests/test_simulator_validation.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.studies.like import medians, read_live, simulate_like

pytestmark = [pytest.mark.validation, pytest.mark.timeout(3600)]

#: Systems x nodes, of both models: eight configurations.
RUNS = (
    [
        "--fabric",
        "2P4D",
        "--system",
        "basic",
        "--system",
        "basic+layerwise",
        "--system",
        "+dual",
        "--system",
        "dualpath",
    ],
    ["--fabric", "1P1D", "--model", "ds-27b", "--system", "basic", "--system", "dualpath"],
    ["--fabric", "1P2D", "--model", "ds-27b", "--system", "basic", "--system", "dualpath"],
)
MEASURES = {"JCT s": "job completion time", "TTFT mean s": "mean TTFT", "bytes per NIC": "bytes through a NIC"}
WITHIN_PERCENT = 5.0


def test_simulation_is_within_5_percent_of_live(tmp_path: Path) -> None:
    """Median over the configurations of what each is off by."""
    pairs = []
    for number, arguments in enumerate(RUNS):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, "-m", "loadgen", "compare", *arguments, "--rounds", "1", "--quick"]
        subprocess.run([*command, "--progress", "none", "--out", str(out)], check=True, timeout=1800)
        live: dict[str, Any] = read_live(out)
        pairs += simulate_like(live)
    off = medians(pairs)
    print(json.dumps({pair.title: pair.differences() for pair in pairs}, indent=1))
    print(json.dumps(off, indent=1))
    assert len(pairs) >= 6
    assert {name: off[name] for name in MEASURES if off[name] > WITHIN_PERCENT} == {}
