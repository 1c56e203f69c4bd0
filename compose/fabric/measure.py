"""Does a fabric do what it says? The rate of its NICs, and what a small message of the high class waits under bulk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from common.errors import ConfigError
from common.transport.classes import KV
from compose.fabric.fabric import Fabric
from compose.fabric.layout import Nic

PEER = Path(__file__).with_name("peer.py")
BULK_TOS, HIGH_TOS = KV.dscp << 2, 0
PING_INTERVAL_S = 0.005
#: Until the queues of a bulk transfer have filled.
SETTLE_S = 0.5
START_S, END_S = 10.0, 30.0


def _command(fabric: Fabric, node: str, *arguments: object) -> list[str]:
    return [*fabric.prefix(node), sys.executable, "-I", "-S", str(PEER), *map(str, arguments)]


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _server(fabric: Fabric, node: str, role: str, address: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Results of a server on a node, which is ready."""
    with _running(_command(fabric, node, role, address)) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise ConfigError(f"{role} on {node} did not start")
        yield map(json.loads, process.stdout)


def measure_rate(fabric: Fabric, sender: str, receiver: str, nic: Nic, seconds: float, flows: int = 4) -> float:
    """Payload bytes/s that arrive from sender at receiver, in the KV class, with so many connections."""
    address = fabric.addresses(receiver)[nic]
    with _server(fabric, receiver, "sink", address) as results:
        subprocess.run(
            _command(fabric, sender, "bulk", address, seconds, flows, BULK_TOS), timeout=seconds + END_S, check=True
        )
        done = [next(results) for _ in range(flows)]
    total = sum(result["bytes"] for result in done)
    return float(total / (max(result["end_s"] for result in done) - min(result["start_s"] for result in done)))


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips, seconds."""

    p50_s: float
    p99_s: float


def measure_latency(fabric: Fabric, client: str, server: str, nic: Nic, count: int = 400) -> Latency:
    """Of small messages of the high class."""
    address = fabric.addresses(server)[nic]
    with _server(fabric, server, "echo", address):
        command = _command(fabric, client, "ping", address, count, PING_INTERVAL_S, HIGH_TOS)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=END_S + count, check=True)
    cuts = quantiles(json.loads(done.stdout)["round_trips_s"], n=100, method="inclusive")
    return Latency(cuts[49], cuts[98])


@contextmanager
def bulk_load(fabric: Fabric, sender: str, receiver: str, nic: Nic, flows: int = 4) -> Iterator[None]:
    """KV-class traffic from sender to receiver, as much as fits, for as long as the context lasts."""
    address = fabric.addresses(receiver)[nic]
    with (
        _server(fabric, receiver, "sink", address),
        _running(_command(fabric, sender, "bulk", address, 3600, flows, BULK_TOS)) as process,
    ):
        try:
            process.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            yield
        else:
            raise ConfigError(f"bulk traffic from {sender} to {receiver} did not start")


def report(fabric: Fabric, seconds: float) -> Iterator[str]:
    """Lines for people, as they are found: p0 and d0 of a fabric in which nothing else runs.

    An idle CPU that wakes up late shows in p99. Keep the CPUs awake (say, `chrt -i 0` on a busy loop for each).
    """
    layout = fabric.layout
    routes: list[tuple[str, str, Nic]] = [("store", "p0", "snic"), ("p0", "store", "snic"), ("p0", "d0", "cnic")]
    for sender, receiver, nic in routes:
        rate, given = measure_rate(fabric, sender, receiver, nic, seconds), layout.rate(nic)
        yield f"{nic} {sender} -> {receiver}: {rate / 1e6:.2f} MB/s of {given / 1e6:.2f} ({rate / given:.1%})"
    for on in (True, False):
        fabric.set_classes(on)
        label = "with classes" if on else "without classes"
        yield f"small message, idle, {label}: {_line(measure_latency(fabric, 'p0', 'd0', 'cnic'))}"
        with bulk_load(fabric, "p0", "d0", "cnic"):
            yield f"small message under bulk, {label}: {_line(measure_latency(fabric, 'p0', 'd0', 'cnic'))}"


def _line(latency: Latency) -> str:
    return f"p50 {latency.p50_s * 1e6:,.0f} us, p99 {latency.p99_s * 1e6:,.0f} us"
