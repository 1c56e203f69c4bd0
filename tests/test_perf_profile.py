"""`dualpath profile`: what it measures on a tiny model, what it derives, and what a user sees and gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.config import load_config
from common.errors import ConfigError
from common.model import read_model_directory
from common.perf.predictor import Identity, load_profile
from services.engine.torch_backend.backend import TorchBackend
from services.engine.torch_backend.profile_run import decode_grid, measure, prefill_grid
from services.launcher.profile import Workload, findings, make_profile, measure_read_rate
from tests.launch_harness import Launched
from tests.models import tiny_model


def test_the_grid_covers_powers_of_two_that_fit():
    assert prefill_grid(1024, 64) == [(c, n) for c in (0, 256, 512) for n in (16, 32, 64)]
    assert prefill_grid(300, 512) == [(0, 16), (0, 32), (0, 64), (0, 128), (0, 256), (256, 16), (256, 32)]
    assert prefill_grid(64, 8) == [(0, 8)]
    assert decode_grid(1024, 16) == [(256, 1), (256, 16), (1024, 1), (1024, 16)]
    assert decode_grid(100, 1) == [(100, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


def configured(model: Path, tmp_path: Path, **values: object):
    overrides = {"model.path": str(model), "prefill.threads": 1, "storage.path": str(tmp_path / "blocks"), **values}
    return load_config(overrides=overrides)


def test_every_point_of_both_grids_is_measured(model: Path, tmp_path: Path):
    config = configured(model, tmp_path, **{"prefill.device_memory": "1MiB", "decode.device_memory": "1MiB"})
    done = []
    measured = measure(config, 10_000, 2, lambda *count: done.append(count))
    # a row of 256 bytes in 2 slots; a Full Block of 64 KiB: 16 pages, which are fewer
    assert measured["max_context"] == 1024
    points = [(point["cached"], point["new"]) for point in measured["prefill"]]
    assert points == prefill_grid(1024, 512)
    assert [(point["context"], point["sequences"]) for point in measured["decode"]] == decode_grid(1024, 16)
    assert all(point["attention_s"] > 0 and point["linear_s"] > 0 for point in measured["prefill"])
    assert done[-1] == (2 * (len(points) + 4),) * 2


def test_thresholds_come_from_measured_rates(model: Path, tmp_path: Path):
    """attention 0.001 + 1e-7 x cached x new, all else 0.002 x new: a turn of 950 + 50 tokens takes 0.001 + 0.00475 +
    0.1 = 0.10575 s, that is 9,456 tokens/s, and 47,281 in 5 s. 1 MB/s is 976.6 tokens of 1,024 bytes, 2,929 in 3 s."""
    points = [
        {"cached": cached, "new": new, "attention_s": 0.001 + 1e-7 * cached * new, "linear_s": 0.002 * new}
        for cached, new in prefill_grid(1000, 256)
    ]
    config = configured(model, tmp_path)
    manifest = read_model_directory(model, "float32", 64).manifest
    assert manifest.geometry.bytes_per_token == 1024
    measured = {"max_context": 1000, "threads": 1, "prefill": points, "decode": []}
    profile = make_profile(config, manifest, Workload(hit_ratio=0.95), measured, 1e6)
    assert profile.attention.error.p95 < 1e-6
    assert profile.thresholds.alpha == 2929
    assert profile.thresholds.beta == pytest.approx(47_281, abs=1)
    assert profile.identity == Identity(manifest.model_digest, "cpu", "float32", 1)
    assert any("scheduler.alpha = 2929" in line for line in findings(profile))
    with pytest.raises(ConfigError, match="too few"):
        make_profile(config, manifest, Workload(), {**measured, "prefill": points[:3]}, 1e6)


async def test_a_profile_binds_the_engines_that_prefill(model: Path, tmp_path: Path):
    """It is of prefill on one thread: a prefill engine on two refuses it, a decode engine on any number ignores it."""
    out = tmp_path / "profile.json"
    points = [
        {"cached": c, "new": n, "attention_s": 1e-7 * n, "linear_s": 1e-7 * n} for c, n in prefill_grid(1000, 256)
    ]
    measured = {"max_context": 1000, "threads": 1, "prefill": points, "decode": []}
    manifest = read_model_directory(model, "float32", 64).manifest
    config = configured(model, tmp_path, **{"perf.predictor": str(out), "decode.threads": 2})
    make_profile(config, manifest, Workload(), measured, 1e6).save(out)
    prefill, decode = [await TorchBackend.load(config, role, "test") for role in (config.prefill, config.decode)]
    assert prefill.attention_s is not None and prefill.attention_s(0, 100) == pytest.approx(1e-5)
    assert decode.attention_s is None
    for backend in (prefill, decode):
        await backend.close()
    config = configured(model, tmp_path, **{"perf.predictor": str(out), "prefill.threads": 2})
    with pytest.raises(ConfigError, match="is for threads 1"):
        await TorchBackend.load(config, config.prefill, "test")


async def test_the_read_rate_is_real_or_that_of_a_paced_nic(model: Path, tmp_path: Path):
    manifest = read_model_directory(model, "float32", 64).manifest
    real = await measure_read_rate(configured(model, tmp_path), manifest)
    assert real > 1e5
    paced = await measure_read_rate(configured(model, tmp_path, **{"network.snic_rate": 1000.0}), manifest)
    assert paced == 1000.0
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"storage\.path: cannot write"):
        await measure_read_rate(configured(model, tmp_path / "file" / "below"), manifest)


def test_a_user_gets_a_table_and_a_file_that_fits_the_model(model: Path, tmp_path: Path):
    out = tmp_path / "profile.json"
    arguments = ("--model", str(model), "--out", str(out), "--max-context", "256", "--repeats", "1")
    run = Launched(tmp_path, "profile", *arguments)
    assert run.process.wait(150) == 0, run.stderr
    assert "predicted ms" in run.stdout
    assert "scheduler.alpha" in run.stdout
    manifest = read_model_directory(model, "float32", 64).manifest
    profile = load_profile(out, Identity(manifest.model_digest, "cpu", "float32", 0))
    assert profile.measured["max_context"] == 256
    assert json.loads(out.read_text())["format"] == "dualpath profile 1"


def test_a_result_that_cannot_be_written_is_refused_before_anything_runs(model: Path, tmp_path: Path):
    run = Launched(tmp_path, "profile", "--model", str(model), "--out", str(tmp_path / "no" / "profile.json"))
    assert run.process.wait(60) == 2
    assert any("no such directory" in line for line in run.error_lines)


def test_a_profiled_model_is_not_measured(tmp_path: Path):
    run = Launched(tmp_path, "profile", "--out", "profile.json", DUALPATH_MODEL__PROFILE="ds-27b")
    assert run.process.wait(60) == 2
    assert any("'ds-27b' is a prediction" in line for line in run.error_lines)
