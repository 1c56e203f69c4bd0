"""Fabrics for real: namespaces that are made, shape and count traffic, and are gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from compose.fabric import Fabric, measure, registry, system
from tests.fabric_support import need_fabric

pytestmark = pytest.mark.fabric

SNIC_RATE, CNIC_RATE = 5_000_000, 40_000_000


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_fabric()


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric.up(1, 1, SNIC_RATE, CNIC_RATE) as fabric:
        yield fabric


def left_of(name: str, device: str = "") -> list[str]:
    """What there is of a fabric: namespaces, its end of the uplink, its record."""
    devices = [found for found in os.listdir("/sys/class/net") if found == device]
    return system.namespaces(f"dualpath-{name}-") + devices + [entry for entry in registry.names() if entry == name]


def run_on(fabric: Fabric, node: str, script: str) -> str:
    return system.output(*fabric.prefix(node), "sh", "-c", script)


def reaches(fabric: Fabric, node: str | None, address: str, port: int, seconds: float = 15.0) -> bool:
    """Whether a process on a node (None: on the machine itself) can connect; tried for so long."""
    prefix = fabric.prefix(node) if node else []
    script = f"import socket; socket.create_connection(({address!r}, {port}), 1).close()"
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run([*prefix, sys.executable, "-ISc", script], capture_output=True, check=False)
        if done.returncode == 0 or time.monotonic() > deadline:
            return done.returncode == 0


def test_nothing_is_left(fabric: Fabric) -> None:
    name, device = fabric.layout.name, fabric.layout.uplink_device
    sleeper = subprocess.Popen([*fabric.prefix("d0"), "sleep", "1000"])
    keys = Path(str(fabric.settings("p0")["security.curve_dir"]))
    assert (keys / "cluster.key_secret").is_file() and keys.stat().st_mode & 0o777 == 0o700
    assert len(left_of(name, device)) == 5 + 1 + 1
    fabric.down()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert left_of(name, device) == [] and not keys.exists()
    fabric.down()


def test_rates_hold_and_classes_are_told_apart(fabric: Fabric) -> None:
    for sender, receiver, nic, rate in (
        ("store", "p0", "snic", SNIC_RATE),
        ("p0", "store", "snic", SNIC_RATE),
        ("p0", "d0", "cnic", CNIC_RATE),
    ):
        before = {(at.node, at.nic, at.direction, at.traffic_class): at.bytes for at in fabric.stats()}
        measured = measure.measure_rate(fabric, sender, receiver, nic, 1.5, flows=2)
        assert measured < 1.05 * rate  # never faster; slower is a busy machine's right
        wire = {
            key: at.bytes - before[key]
            for at in fabric.stats()
            if (key := (at.node, at.nic, at.direction, at.traffic_class)) in before
        }
        bulk = "high" if nic == "snic" else "low"
        for node, direction in ((sender, "tx"), (receiver, "rx")):
            if node != "store":
                assert wire[(node, nic, direction, bulk)] > measured
        if nic == "cnic":
            assert wire[("p0", "cnic", "tx", "high")] < 0.01 * wire[("p0", "cnic", "tx", "low")]


def test_a_small_message_rides_the_high_class_unless_classes_are_off(fabric: Fabric) -> None:
    def counted() -> dict[str, int]:
        return {
            at.traffic_class: at.bytes
            for at in fabric.stats()
            if (at.node, at.nic, at.direction) == ("d0", "cnic", "rx")
        }

    measure.measure_latency(fabric, "p0", "d0", "cnic", count=20)
    assert counted()["high"] > 20 * 60 and counted()["low"] == 0  # frames are 60 bytes at least
    measure.measure_rate(fabric, "p0", "d0", "cnic", 0.2, flows=1)
    low = counted()["low"]
    assert low > 100_000
    fabric.set_classes(False)
    measure.measure_rate(fabric, "p0", "d0", "cnic", 0.2, flows=1)
    assert counted()["low"] == low


def test_a_rate_changes_while_traffic_flows(fabric: Fabric) -> None:
    with measure.bulk_load(fabric, "p0", "d0", "cnic"):
        fabric.set_rate("d0", "cnic", CNIC_RATE // 10)
        time.sleep(0.5)  # what had been let through before
        start, before = time.monotonic(), _received(fabric)
        time.sleep(1.0)
        received, seconds = _received(fabric) - before, time.monotonic() - start
    assert 0 < received < 1.1 * CNIC_RATE / 10 * seconds + 100_000
    with pytest.raises(ConfigError, match="node ctl has no rate"):
        fabric.set_rate("ctl", "cnic", CNIC_RATE)


def _received(fabric: Fabric) -> int:
    return sum(at.bytes for at in fabric.stats() if (at.node, at.nic, at.direction) == ("d0", "cnic", "rx"))


def test_who_reaches_whom(fabric: Fabric) -> None:
    """The store finds the scheduler; this machine finds scheduler and front end; no engine finds the machine."""
    control, (host, port) = fabric.addresses("ctl")["cnic"], fabric.url.removeprefix("http://").split(":")
    script = f"import socket, time; a = [socket.create_server(x) for x in (({control!r}, 5700), ({host!r}, {port}))]; "
    server = subprocess.Popen(
        [*fabric.prefix("ctl"), sys.executable, "-ISc", script + "print('ready', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    with server.stdout:
        for node in ("p0", "d0", "store", "ctl", None):
            assert reaches(fabric, node, control, 5700), node
        assert reaches(fabric, None, host, int(port))
        assert not reaches(fabric, "p0", host, int(port), seconds=1.0)
        fabric.link("p0", "cnic", False)
        assert not reaches(fabric, "p0", control, 5700, seconds=1.0)
        assert reaches(fabric, "d0", control, 5700)
        fabric.link("p0", "cnic", True)
        assert reaches(fabric, "p0", control, 5700)
        fabric.kill("ctl")
        assert server.wait(10) == -signal.SIGKILL


def test_two_at_once(fabric: Fabric) -> None:
    with Fabric.up(1, 1, SNIC_RATE, CNIC_RATE, name="other") as other:
        assert other.layout.slot != fabric.layout.slot
        assert other.addresses("p0")["snic"] in run_on(other, "p0", "ip addr")
        with pytest.raises(ConfigError, match=f"fabric {fabric.layout.name} is in use"):
            Fabric.up(1, 1, SNIC_RATE, CNIC_RATE)
        with pytest.raises(ConfigError, match="in use"):
            Fabric.up(1, 1, SNIC_RATE, CNIC_RATE, name="other", keep=True)
    assert system.namespaces("dualpath-other-") == []
    assert run_on(fabric, "p0", "echo still there") == "still there\n"


def test_what_a_killed_run_has_left_goes_with_the_next_one() -> None:
    script = (
        "import os, subprocess\nfrom compose.fabric import Fabric\n"
        f"fabric = Fabric.up(1, 2, {SNIC_RATE}, {CNIC_RATE}, name='killed')\n"
        "subprocess.Popen([*fabric.prefix('p0'), 'sleep', '1000'])\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(system.namespaces("dualpath-killed-")) == 6
    with Fabric.up(1, 1, SNIC_RATE, CNIC_RATE):
        assert system.namespaces("dualpath-killed-") == [] and "killed" not in registry.names()


def test_a_kept_fabric_stays_and_the_same_again_is_afresh() -> None:
    kept = Fabric.up(1, 1, SNIC_RATE, CNIC_RATE, name="kept", keep=True)
    try:
        with Fabric.up(1, 1, SNIC_RATE, CNIC_RATE):
            assert len(system.namespaces("dualpath-kept-")) == 5
        again = Fabric.up(1, 2, SNIC_RATE, CNIC_RATE, name="kept", keep=True)
        assert Fabric.attach("kept").layout == again.layout and again.nodes[-1] == "d1"
    finally:
        kept.down()
    assert left_of("kept") == []
    with pytest.raises(ConfigError, match="no fabric kept"):
        Fabric.attach("kept")


def test_a_fabric_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.fabric.topology.uplink", lambda layout: ["link add nonsense type nonsense"])
    with pytest.raises(ConfigError, match="nonsense"):
        Fabric.up(1, 1, SNIC_RATE, CNIC_RATE, name="broken")
    assert left_of("broken") == []
