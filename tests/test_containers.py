"""compose/: a cluster in containers comes up, answers like one process, and goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.engine.torch_backend.reference import Reference
from tests.containers_support import (
    PROJECT,
    WAIT_S,
    Composed,
    complete,
    docker,
    in_container,
    need_image,
    prompt,
    until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

OUTPUT_TOKENS = 12
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    started = time.monotonic()
    need_image(tmp_path_factory)
    built = time.monotonic()
    with Composed(tmp_path_factory.mktemp("cluster"), model) as cluster:
        cluster.up()
        until(lambda: _answers(cluster), WAIT_S, "a first answer")
        answered = time.monotonic()
        print(f"image built in {built - started:.1f} s, first answer {answered - built:.1f} s after up began")
        yield cluster


def _answers(cluster: Composed) -> bool:
    try:
        return bool(complete(cluster.url, prompt(0), 1))
    except (httpx.HTTPError, AssertionError):
        return False


def test_first_answer_equals_the_reference(cluster: Composed, reference: Reference) -> None:
    expected = reference.greedy(prompt(1), OUTPUT_TOKENS)
    assert complete(cluster.url, prompt(1), OUTPUT_TOKENS) == expected
    assert complete(cluster.url, prompt(1), OUTPUT_TOKENS) == expected, "with blocks out of the store"


def test_each_engine_has_a_nic_on_either_network(cluster: Composed) -> None:
    engines = [cluster.containers(role)[0] for role in ("prefill", "decode")]
    devices = {}
    for engine in engines:
        networks = cluster.inspect(engine)["NetworkSettings"]["Networks"]
        addresses = [networks[cluster.network(name)]["IPAddress"] for name in ("storage", "compute")]
        assert len(networks) == 2
        assert in_container(engine, "cat", "/tmp/addresses").split() == addresses
        interfaces = in_container(engine, "ip", "-oneline", "-4", "address")
        devices[engine] = [
            next(line.split()[1] for line in interfaces.splitlines() if f"inet {address}/" in line)
            for address in addresses
        ]
    complete(cluster.url, prompt(2), 1)
    stored = len(prompt(2)) // 64 * 64

    def received(nic: int) -> int:
        files = {engine: f"/sys/class/net/{devices[engine][nic]}/statistics/rx_bytes" for engine in engines}
        return sum(int(in_container(engine, "cat", file)) for engine, file in files.items())

    def read_again() -> bool:
        before = received(0)
        complete(cluster.url, prompt(2), 1)
        return received(0) - before >= stored * KV_BYTES_PER_TOKEN

    until(read_again, WAIT_S, "hit KV coming in on a storage NIC")  # blocks are persisted after the answer


def test_curve_is_on(cluster: Composed) -> None:
    """A ZMTP greeting names the mechanism: bytes 12 to 32."""
    greeting = (
        "import socket; s = socket.create_connection(('scheduler', 5700)); "
        "s.sendall(b'\\xff' + bytes(8) + b'\\x7f\\x03\\x00'); g = b''\n"
        "while len(g) < 64: g += s.recv(64 - len(g))\n"
        "print(g[12:32].rstrip(b'\\0').decode())"
    )
    assert in_container(cluster.containers("frontend")[0], "python3", "-c", greeting).strip() == "CURVE"


def test_processes_are_not_root_and_hold_no_capability(cluster: Composed) -> None:
    for service in ("scheduler", "storage-gateway", "prefill", "decode", "frontend"):
        status = in_container(cluster.containers(service)[0], "cat", "/proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {"10001"}, service
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0, service


def test_loadgen_leaves_its_report(cluster: Composed) -> None:
    experiment = "replay --agents 2 --max-sessions 2 --max-turns 2 --max-context 500"
    cluster.compose("run", "--rm", "-T", "-e", f"EXPERIMENT={experiment}", "loadgen")
    assert (cluster.results / "result.json").is_file()
    assert "http://frontend:8000" in (cluster.results / "report.html").read_text()


def test_down_leaves_nothing(cluster: Composed) -> None:
    cluster.down()
    ours = ("--filter", f"label=com.docker.compose.project={PROJECT}")
    assert not docker("ps", "-aq", *ours).split()
    assert not docker("network", "ls", "-q", *ours).split()
    assert not docker("volume", "ls", "-q", *ours).split()
