"""compose/: a cluster in containers comes up, answers like one process, scales, and stands what befalls containers."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.engine.torch_backend.reference import Reference
from tests.containers_support import PROJECT, Composed, build_image, complete, docker, need_containers, until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

VOCABULARY = range(3, 512)
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 12
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
WAIT_S = 400.0  # what takes seconds on idle cores


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    need_containers()
    started = time.monotonic()
    if "IMAGE" not in os.environ:
        build_image(tmp_path_factory.mktemp("image"))
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


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=PROMPT_TOKENS)


class Load:
    """Requests without end, several at a time, each of which must be answered like the reference does."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self._url = url
        self._clients = clients
        self._stop = threading.Event()
        self.answers: dict[int, list[int]] = {}
        self.failures: list[str] = []

    def _client(self, number: int) -> None:
        seed = 1000 * (number + 1)
        while not self._stop.is_set():
            seed += 1
            try:
                self.answers[seed] = complete(self._url, prompt(seed), OUTPUT_TOKENS)
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(repr(error))

    @contextmanager
    def running(self) -> Iterator[Load]:
        with ThreadPoolExecutor(self._clients) as pool:
            for number in range(self._clients):
                pool.submit(self._client, number)
            try:
                yield self
            finally:
                self._stop.set()

    def goes_on(self, more: int = 10) -> None:
        """Wait until so many more requests have been answered."""
        before = len(self.answers)
        until(lambda: len(self.answers) >= before + more, WAIT_S, f"{more} more answers ({self.failures[:3]})")

    def check(self, reference: Reference) -> None:
        assert not self.failures, self.failures[:3]
        for seed, tokens in self.answers.items():
            assert tokens == reference.greedy(prompt(seed), OUTPUT_TOKENS), f"request {seed}"


def _settled(cluster: Composed, prefill: int, decode: int) -> None:
    """Wait until the scheduler has exactly so many engines."""
    until(
        lambda: (members := cluster.members()).get("prefill") == prefill and members.get("decode") == decode,
        WAIT_S,
        f"{prefill} prefill and {decode} decode engines",
    )


def _run(container: str, *command: str) -> str:
    return docker("exec", container, *command)


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
        assert _run(engine, "cat", "/tmp/addresses").split() == addresses
        interfaces = _run(engine, "ip", "-oneline", "-4", "address")
        devices[engine] = [
            next(line.split()[1] for line in interfaces.splitlines() if f"inet {address}/" in line)
            for address in addresses
        ]
    complete(cluster.url, prompt(2), 1)
    stored = len(prompt(2)) // 64 * 64

    def received(nic: int) -> int:
        files = {engine: f"/sys/class/net/{devices[engine][nic]}/statistics/rx_bytes" for engine in engines}
        return sum(int(_run(engine, "cat", file)) for engine, file in files.items())

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
    assert _run(cluster.containers("frontend")[0], "python3", "-c", greeting).strip() == "CURVE"


def test_processes_are_not_root_and_hold_no_capability(cluster: Composed) -> None:
    for service in ("scheduler", "storage-gateway", "prefill", "decode", "frontend"):
        status = _run(cluster.containers(service)[0], "cat", "/proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {"10001"}, service
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0, service


def test_engines_join_and_leave_under_load(cluster: Composed, reference: Reference) -> None:
    with Load(cluster.url).running() as load:
        load.goes_on()
        cluster.up(prefill=2, decode=4)
        _settled(cluster, 2, 4)
        load.goes_on()
        cluster.up(prefill=1, decode=1)
        _settled(cluster, 1, 1)
        load.goes_on()
    load.check(reference)


def test_a_killed_engine_costs_no_request(cluster: Composed, reference: Reference) -> None:
    cluster.up(prefill=1, decode=2)
    _settled(cluster, 1, 2)
    with Load(cluster.url).running() as load:
        load.goes_on()
        docker("kill", cluster.containers("decode")[0])
        _settled(cluster, 1, 1)
        load.goes_on()
        cluster.up(prefill=1, decode=2)
        _settled(cluster, 1, 2)
        load.goes_on()
    load.check(reference)


def test_an_engine_cut_off_its_network_comes_back(cluster: Composed, reference: Reference) -> None:
    cluster.up(prefill=2, decode=1)
    _settled(cluster, 2, 1)
    victim = cluster.containers("prefill")[0]
    with Load(cluster.url).running() as load:
        load.goes_on()
        docker("network", "disconnect", cluster.network("compute"), victim)
        _settled(cluster, 1, 1)
        load.goes_on()
        docker("network", "connect", "--alias", "cnic", "--alias", "prefill", cluster.network("compute"), victim)
        _settled(cluster, 2, 1)
        load.goes_on()
    load.check(reference)


def test_several_gateways_share_the_blocks(cluster: Composed, reference: Reference) -> None:
    cluster.up(**{"storage-gateway": 2})
    until(lambda: cluster.members().get("storage-gateway") == 2, WAIT_S, "two gateways")
    with Load(cluster.url).running() as load:
        load.goes_on()
        cluster.up(**{"storage-gateway": 1})
        until(lambda: cluster.members().get("storage-gateway") == 1, WAIT_S, "one gateway")
        load.goes_on()
    load.check(reference)


def test_sigterm_ends_a_process_in_good_order(cluster: Composed) -> None:
    gateway = cluster.containers("storage-gateway")[0]
    docker("stop", gateway)
    state = cluster.inspect(gateway)["State"]
    docker("start", gateway)
    assert state["ExitCode"] == 0
    until(lambda: cluster.members().get("storage-gateway") == 1, WAIT_S, "the gateway again")


def test_loadgen_leaves_its_report(cluster: Composed) -> None:
    cluster.compose("run", "--rm", "-T", "-e", "EXPERIMENT=replay --agents 2 --max-sessions 2 --max-turns 2", "loadgen")
    assert (cluster.results / "result.json").is_file()
    assert "<svg" in (cluster.results / "report.html").read_text()


def test_nics_are_shaped_both_ways(model: Path, cluster: Composed, tmp_path: Path) -> None:
    rate, sent = 4_000_000, 6_000_000  # bytes/s, bytes
    cluster.variables |= {"SNIC_RATE": "4MB/s", "CNIC_RATE": "4MB/s"}
    cluster.up(prefill=1, decode=1)
    _settled(cluster, 1, 1)
    free, shaped = cluster.containers("storage-gateway")[0], cluster.containers("prefill")[0]
    for name in ("storage", "compute"):
        at = {
            container: cluster.inspect(container)["NetworkSettings"]["Networks"][cluster.network(name)]["IPAddress"]
            for container in (free, shaped)
        }
        for sender, receiver in ((free, shaped), (shaped, free)):
            seconds = _send(sender, receiver, at[receiver], sent)
            print(f"{name}: {sent / seconds / 1e6:.2f} MB/s")
            assert 0.5 * rate < sent / seconds < 1.2 * rate
    assert complete(cluster.url, prompt(1), 1)


def _send(sender: str, receiver: str, address: str, num_bytes: int) -> float:
    """Seconds that so many bytes take."""
    listen = f"""
import socket
connection, _ = socket.create_server(('{address}', 7777)).accept()
while connection.recv(65536):
    pass
"""
    send = f"""
import socket, time
while True:
    try:
        s = socket.create_connection(('{address}', 7777), 5)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
started = time.monotonic()
s.settimeout(60)
s.sendall(bytes({num_bytes}))
s.shutdown(socket.SHUT_WR)
s.recv(1)
print(time.monotonic() - started)
"""
    docker("exec", "--detach", receiver, "python3", "-c", listen)
    return float(_run(sender, "python3", "-c", send))


def test_down_leaves_nothing(cluster: Composed) -> None:
    cluster.down()
    ours = ("--filter", f"label=com.docker.compose.project={PROJECT}")
    assert not docker("ps", "-aq", *ours).split()
    assert not docker("network", "ls", "-q", *ours).split()
    assert not docker("volume", "ls", "-q", *ours).split()
