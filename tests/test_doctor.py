"""`dualpath doctor`: what a check is, what two hosts have to say of one another, and the command on this host."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from common.children import python_module
from common.isolation.latency import Latency
from common.wire import PROTOCOL_VERSION
from services.launcher.commands import app
from services.launcher.doctor import isolation
from services.launcher.doctor.check import Check, healthy, show_bytes
from services.launcher.doctor.peer import UNREAD, judge_model, judge_mtu, judge_protocol, read_manifest
from tests.doctor_support import FAIL, OK, WARN, configured
from tests.models import tiny_model

GIB = 1 << 30

# -- what a check is --


def test_a_check_is_a_line_and_only_failures_are_unhealthy():
    bad = Check("memlock", FAIL, "8 MiB", "ulimit -l unlimited")
    assert str(bad) == "fail  memlock: 8 MiB -> ulimit -l unlimited"
    assert str(Check("clock", OK, "synchronised")) == "ok    clock: synchronised"
    assert healthy([Check("a", OK, ""), Check("b", WARN, "", "x")]) and not healthy([bad])


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 bytes"), (8 << 20, "8 MiB"), (3 * GIB // 2, "1.5 GiB"), (5 << 40, "5 TiB")]
)
def test_sizes(num_bytes, words):
    assert show_bytes(num_bytes) == words


# -- isolation --


def measured(idle: float, same: float, own: float) -> dict[str, Latency]:
    values = zip(isolation.PHASES, (idle, same, own), strict=True)
    return {name: Latency(1000, value * 1e-6, 2 * value * 1e-6) for name, value in values}


@pytest.mark.parametrize(
    ("phases", "level", "word"),
    [
        (measured(131, 877, 141), OK, "under bulk of its class 6.7 x idle at p50, under KV 1.08 x"),
        (measured(131, 877, 700), FAIL, "under KV 5.34 x"),
        (measured(131, 300, 300), WARN, "2.3 x"),
    ],
)
def test_verdicts_of_isolation(phases, level, word):
    *_, verdict = isolation.judge_isolation(phases)
    assert verdict.level is level and word in verdict.found
    assert level is not FAIL or "dualpath qos" in verdict.fix


# -- two hosts --


def test_mtus_of_two_hosts_must_be_the_same():
    assert judge_mtu(9000, 9000).level is OK and judge_mtu(0, 9000).level is OK
    assert judge_mtu(9000, 1500).level is FAIL


def test_protocols_of_two_hosts_must_be_the_same():
    assert judge_protocol(PROTOCOL_VERSION).level is OK
    check = judge_protocol(PROTOCOL_VERSION + 1)
    assert check.level is FAIL and check.found.startswith(f"{PROTOCOL_VERSION} here, ") and "one version" in check.fix


def test_models_of_two_hosts_must_have_the_same_blocks(tmp_path):
    """What differs is named. Weights are not read; where neither side knows their digest it is not compared."""
    own = read_manifest(configured(model__path=str(tiny_model(tmp_path / "one"))))
    assert own is not None and own.model_digest == UNREAD
    same = judge_model(own, own)
    assert same.level is OK and "weights not compared" in same.found
    assert judge_model(own, replace(own, model_digest="abc")).level is OK
    known = replace(own, model_digest="def")
    assert judge_model(known, known).level is OK and "compared" not in judge_model(known, known).found
    for peer, named in (
        (replace(known, model_digest="abc"), "model_digest: def != abc"),
        (replace(known, geometry=replace(own.geometry, block_size=32)), "geometry.block_size: 64 != 32"),
        (replace(known, geometry=replace(own.geometry, num_layers=61)), "geometry.num_layers: "),
        (replace(known, format_version=99), "format_version: "),
    ):
        check = judge_model(known, peer)
        assert check.level is FAIL and named in check.found and "[model]" in check.fix
    assert "not known here" in judge_model(None, own).found and judge_model(own, None).level is OK
    assert read_manifest(configured(model__path="")) is None
    profiled = read_manifest(configured(model__profile="ds-660b"))
    assert judge_model(own, profiled).level is FAIL


@pytest.mark.timeout(120)
def test_a_peer_with_other_blocks_is_named_by_what_differs(tmp_path):
    model = str(tiny_model(tmp_path))

    def command(block_size: int, *arguments: str) -> dict[str, Any]:
        own = {"DUALPATH_MODEL__PATH": model, "DUALPATH_MODEL__BLOCK_SIZE": str(block_size)}
        return {
            "args": python_module("services.cli", "doctor", *arguments),
            "env": {**os.environ, **own},
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }

    with subprocess.Popen(**command(64, "--listen", "tcp://127.0.0.1:*")) as listener:
        said = listener.stderr.readline()
        endpoint = re.search(r"tcp://\S+:\d+", said)
        assert endpoint, said
        measuring = command(32, "--json", "--peer", endpoint[0].rstrip(":"), "--seconds", "0.1")
        told = json.loads(subprocess.run(**measuring, check=False).stdout)
        listener.terminate()
        assert listener.wait(20) == 0
    checks = {check["name"]: check for check in told["checks"]}
    assert not told["ok"]
    assert checks["model of both hosts"]["level"] == "fail"
    assert "geometry.block_size: 32 != 64" in checks["model of both hosts"]["found"]
    assert checks["protocol of both hosts"]["level"] == "ok"
    assert set(told["isolation"]) == {"idle", "same_class", "own_class"}


# -- the command --


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_lines_and_json():
    code, told, _ = run("--json")
    report = json.loads(told)
    assert {"packages", "memory", "memlock", "clock", "transport"} <= {check["name"] for check in report["checks"]}
    assert all(set(check) == {"name", "level", "found", "fix"} for check in report["checks"])
    assert all(check["fix"] for check in report["checks"] if check["level"] != "ok")
    assert (code, report["ok"]) == ((0, True) if code == 0 else (1, False))


def test_what_is_wrong_with_the_configuration_is_among_the_findings(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[network]\ncnik = '1'\n")
    code, told, _ = run("--config", str(file))
    assert code == 1 and "fail  network.cnik: no such field" in told
    code, _, error = run("--config", str(file), "--listen", "tcp://127.0.0.1:0")
    assert code == 2 and "network.cnik" in error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--listen", "tcp://127.0.0.1:1", "--peer", "tcp://127.0.0.1:1"], "give one of them"),
        (["--listen", "tcp://10.1.2.3:1"], "not loopback"),
        (["--listen", "nonsense"], "not an endpoint"),
    ],
)
def test_sides_of_a_measurement_that_cannot_be(arguments, reason):
    code, _, error = run(*arguments)
    assert code == 2 and reason in error


def test_a_transport_that_crosses_no_network_is_not_measured(monkeypatch):
    monkeypatch.setenv("DUALPATH_NETWORK__TRANSPORT", "shm")
    code, _, error = run("--listen", "tcp://127.0.0.1:0")
    assert code == 2 and "crosses no network" in error
