"""What `dualpath qos linux` prints, applied to an interface for real and read back with tc."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest

from common.config import QosConfig
from common.qos.linux import linux
from common.transport.classes import BACKGROUND, COLLECTIVE, KV, mark
from compose.fabric import system
from tests.fabric_support import need_fabric

pytestmark = pytest.mark.fabric

SENDER, RECEIVER = f"dualpathqos{os.getpid()}a", f"dualpathqos{os.getpid()}b"
PORT = 5003
PAYLOAD = 200_000


@pytest.fixture
def pair() -> Iterator[None]:
    """Two namespaces with a cable, 10.9.0.1/fd00::1 and .2."""
    need_fabric()
    system.batch("ip", [f"netns add {SENDER}", f"netns add {RECEIVER}"])
    try:
        system.batch("ip", [f"link add name eth0 type veth peer name eth0 netns {RECEIVER}"], SENDER)
        for number, namespace in enumerate((SENDER, RECEIVER), 1):
            lines = [f"addr add 10.9.0.{number}/24 dev eth0", f"addr add fd00::{number}/64 dev eth0 nodad"]
            system.batch("ip", [*lines, "link set eth0 up"], namespace)
        yield
    finally:
        system.batch("ip", [f"netns del {SENDER}", f"netns del {RECEIVER}"])


def sent(family: int, address: str, traffic_class: object) -> dict[str, int]:
    """Bytes that went through each class's queue while PAYLOAD bytes of a traffic class were sent."""
    before = counters()
    with inside(RECEIVER), socket.create_server((address, PORT), family=family) as server:
        with inside(SENDER), socket.socket(family) as client:
            if traffic_class is not None:
                mark(client, traffic_class)  # type: ignore[arg-type]
            client.settimeout(20)
            client.connect((address, PORT))
            peer, _ = server.accept()
            with peer:
                client.sendall(bytes(PAYLOAD))
                client.shutdown(socket.SHUT_WR)
                peer.settimeout(20)
                received = 0
                while chunk := peer.recv(1 << 16):
                    received += len(chunk)
        assert received == PAYLOAD
    return {handle: num_bytes - before[handle] for handle, num_bytes in counters().items()}


class inside:
    """The thread is in a namespace for as long as this context lasts; its sockets stay there."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __enter__(self) -> None:
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._go(f"/run/netns/{self._namespace}")

    def __exit__(self, *_: object) -> None:
        setns(self._before)
        os.close(self._before)

    def _go(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        setns(fd)
        os.close(fd)


def setns(fd: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


def counters() -> dict[str, int]:
    told = json.loads(system.output("tc", "-netns", SENDER, "-s", "-j", "qdisc", "show", "dev", "eth0"))
    return {entry["handle"]: entry["bytes"] for entry in told if entry["kind"] == "bfifo"}


def test_the_script_applies_twice_and_tells_classes_apart(pair: None) -> None:
    script = "\n".join(linux(QosConfig(), "eth0", 12_500_000, 1500))
    for _ in range(2):  # as somebody does who has changed a weight
        done = subprocess.run(
            [*system.inside(SENDER), "sh", "-e"], input=script, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    classes = system.output("tc", "-netns", SENDER, "class", "show", "dev", "eth0")
    assert re.search(r"class htb 1:10 parent 1:1 leaf 10: prio 0 rate 99900Kbit ceil 100Mbit", classes), classes
    assert re.search(r"class htb 1:20 parent 1:1 leaf 20: prio 1 rate 100Kbit ceil 100Mbit", classes), classes
    cases = [(COLLECTIVE, "10:"), (KV, "20:"), (BACKGROUND, "20:"), (None, "10:")]
    for family, address in ((socket.AF_INET, "10.9.0.2"), (socket.AF_INET6, "fd00::2")):
        for traffic_class, handle in cases:
            passed = sent(family, address, traffic_class)
            other = next(key for key in passed if key != handle)
            assert passed[handle] > PAYLOAD and passed[other] < 5_000, (family, traffic_class, passed)
