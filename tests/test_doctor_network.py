"""`dualpath doctor` on two hosts of a fabric: what it finds there, and isolation between them."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from common.children import python_module
from compose.fabric import Fabric
from tests.fabric_support import need_fabric

pytestmark = pytest.mark.fabric

PORT = 5790


def doctor(fabric: Fabric, node: str, *arguments: str) -> list[str]:
    return [*fabric.prefix(node), *python_module("services.cli", "doctor", *arguments)]


def report(fabric: Fabric, node: str, *arguments: str) -> dict[str, Any]:
    """What it says as JSON; checks by name."""
    environment = {**os.environ, **fabric.environment(node)}
    command = doctor(fabric, node, "--json", *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if told["ok"] else 1)
    return {**told, "checks": {check["name"]: check for check in told["checks"]}}


def test_a_host_of_the_fabric() -> None:
    need_fabric()
    with Fabric.up(1, 1, 20_000_000, 20_000_000) as fabric:
        checks = report(fabric, "p0")["checks"]
        assert checks["network.cnic"]["found"] == f"{fabric.addresses('p0')['cnic']} on cnic, MTU 9000"
        assert checks["traffic classes"]["found"] == "cnic: TCP's KV in class 1:20"
        assert checks["scheduler.control"]["found"].endswith("is on another host")
        assert "CURVE keys" in checks["control plane"]["found"]


@pytest.mark.timeout(180)
def test_isolation_between_two_hosts_is_measured_in_the_classes_that_it_says() -> None:
    need_fabric()
    with Fabric.up(1, 1, 20_000_000, 20_000_000) as fabric:
        endpoint = f"tcp://{fabric.addresses('d0')['cnic']}:{PORT}"
        listener = subprocess.Popen(
            doctor(fabric, "d0", "--listen", endpoint),
            env={**os.environ, **fabric.environment("d0")},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert listener.stderr is not None
        with listener.stderr:
            assert listener.stderr.readline().startswith(f"listening at {endpoint}")
            told = report(fabric, "p0", "--peer", endpoint, "--seconds", "1")
            listener.terminate()
            assert listener.wait(20) == 0
        sent = {
            at.traffic_class: at.bytes
            for at in fabric.stats()
            if (at.node, at.nic, at.direction) == ("p0", "cnic", "tx")
        }
    assert set(told["isolation"]) == {"idle", "same_class", "own_class"}
    assert all(phase["n"] > 0 for phase in told["isolation"].values())
    assert told["checks"]["MTU between hosts"]["found"] == "9000 here, 9000 there"
    assert "isolation" in told["checks"]
    # a second and more of bulk at 20 MB/s in either class
    assert sent["high"] > 10_000_000 and sent["low"] > 10_000_000
