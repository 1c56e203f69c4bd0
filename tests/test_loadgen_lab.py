"""A whole experiment in small: real processes of a profiled model, a warm store, windows of two turns."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.perf.hardware import get_hardware
from common.perf.models import get_model_profile
from common.perf.scaling import Scaling
from common.rundir import RunDirectory
from common.workload.hits import hits
from common.workload.trajectories import Trajectory, Turn
from loadgen.experiments.lab import Lab
from loadgen.experiments.placement import LocalPlacement
from loadgen.experiments.trial import trial
from loadgen.measures.turns import Slo
from loadgen.systems import BOUND_AS
from loadgen.workload.load import Arrival, Load, Offline, Online

#: Each finds 640 tokens in storage on its first turn, and 704 on its second one.
WINDOWS = tuple(
    Trajectory(f"agent-{index}", (Turn(640, 100, 3), Turn(743, 50, 4)), prefix=640) for index in range(4)
)


def directories(run: RunDirectory) -> list[str]:
    return sorted(entry.name for entry in run.path.iterdir() if entry.is_dir())


async def played(system: str, load: Load, know_hits: bool = True) -> dict[str, Any]:
    scaling = Scaling(get_model_profile("ds-27b"), get_hardware("h800"), gpus=1, time_factor=0.5)
    with RunDirectory() as run:
        lab = Lab(scaling, 1, 1, 640, 75, LocalPlacement(scaling), run)
        async with asyncio.timeout(120), lab.seeded(load.trajectories) as seeded:
            result = await trial(lab, system, load, seeded, Slo(), know_hits, lambda turn: None)
            assert directories(run) == [seeded.name]
        assert directories(run) == []
    return result


@pytest.mark.parametrize("system", ["basic", "dualpath+split", "oracle"])
async def test_a_job(system: str) -> None:
    result = await played(system, Offline(WINDOWS, agents=2, whole=True))
    assert result["problems"] == []
    assert result["turns"] == 8
    assert result["hit_tokens"] == sum(sum(hits(window)) for window in WINDOWS)
    assert result["generated_tokens"] == 4 * (3 + 4)
    assert result["makespan_s"] > 0
    assert set(result["ttft_parts_s"]) == {"scheduling", "allocation", "read", "prefill"}
    host = ("not_cpu_bound", "client_not_saturated")
    broken = [flag for name, flag in result["validity"].items() if name not in host and not flag["ok"]]
    assert broken == []
    read = {name: moved for name, moved in result["nic_bytes"].items() if "snic rx" in name}
    if BOUND_AS[system] == "oracle":
        assert sum(read.values()) == 0
    else:
        assert sum(read.values()) == result["hit_tokens"] * 256  # moved bytes a token


async def test_hits_that_are_looked_up() -> None:
    result = await played("dualpath", Offline(WINDOWS[:2], agents=2, whole=True), know_hits=False)
    assert result["hit_tokens"] == 2 * sum(hits(WINDOWS[0]))


async def test_agents_that_arrive() -> None:
    arrivals = tuple(Arrival(0.2 * index, f"{window.name}#", window) for index, window in enumerate(WINDOWS))
    result = await played("dualpath", Online(arrivals, until_s=60.0, misses=100))
    assert result["turns"] == 8
    assert set(result["verdict"]) >= {"met", "stationary", "within_slo"}


async def test_a_hopeless_rate_is_given_up() -> None:
    slow = tuple(replace(window, turns=(Turn(640, 100, 2000),)) for window in WINDOWS)
    arrivals = tuple(Arrival(0.0, f"{window.name}#", window) for window in slow)
    scaling = Scaling(get_model_profile("ds-27b"), get_hardware("h800"), gpus=1, time_factor=0.5)
    with RunDirectory() as run:
        lab = Lab(scaling, 1, 1, 640, 75, LocalPlacement(scaling), run)
        load = Online(arrivals, until_s=0.5, misses=0)
        async with asyncio.timeout(120), lab.seeded(load.trajectories) as seeded:
            result = await trial(lab, "dualpath", load, seeded, Slo(ttft_s=1e-6), True, lambda turn: None)
    assert not result["verdict"]["met"]


async def test_a_full_file_system_is_named_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = Scaling(get_model_profile("ds-27b"), get_hardware("h800"), gpus=1, time_factor=0.5)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunDirectory() as run:
        lab = Lab(scaling, 1, 1, 640, 75, LocalPlacement(scaling), run)
        async with lab.seeded(WINDOWS) as seeded:
            with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"No space left.*make room"):
                patch.setattr(os, "link", full)
                async with lab.cluster("basic", seeded):
                    pass
            assert directories(run) == [seeded.name]
        monkeypatch.setattr(os, "truncate", full)
        with pytest.raises(ConfigError, match=r"No space left.*make room"):
            async with lab.seeded(WINDOWS):
                pass
        assert directories(run) == []


def test_the_store_is_nobody_elses(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert run.path.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_slow_callbacks_are_measured_not_held_against_a_run(tmp_path: Path) -> None:
    scaled = Scaling(get_model_profile("ds-27b"), get_hardware("h800"))
    run = RunDirectory(tmp_path)
    with run:
        lab = Lab(scaled, 1, 1, 640, 100, LocalPlacement(scaled), run)
        log = run.path / "frontend.log"
        log.write_text("01:17 [warning  ] callback kept the event loop   callback=Enrolment.keep cpu_s=0.03\n")
        assert lab.logged() == ""
        log.write_text(log.read_text() + "01:18 [error  ] broken\n")
        assert lab.logged() == "frontend: 01:18 [error  ] broken"
