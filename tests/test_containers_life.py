"""compose/: a cluster in containers scales under load and stands what befalls its containers: no request is lost.

The model is profiled: its engines start without torch, and every token of an answer is known beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from common.perf.models import get_model_profile
from tests.containers_support import (
    PROFILE,
    WAIT_S,
    Composed,
    complete,
    docker,
    in_container,
    need_image,
    prompt,
    until,
)
from tests.lifecycle_harness import expected_tokens

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

OUTPUT_TOKENS = 12
VOCABULARY_SIZE = get_model_profile(PROFILE).vocab_size


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    need_image(tmp_path_factory)
    with Composed(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.up()
        _settled(cluster, 1, 1)
        yield cluster


class Load:
    """Requests without end, several at a time, each of which must be answered as it has to be."""

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

    def check(self) -> None:
        assert not self.failures, self.failures[:3]
        for seed, tokens in self.answers.items():
            assert tokens == expected_tokens(VOCABULARY_SIZE, prompt(seed), OUTPUT_TOKENS), f"request {seed}"


def _settled(cluster: Composed, prefill: int, decode: int) -> None:
    """Wait until the scheduler has exactly so many engines."""
    until(
        lambda: (members := cluster.members()).get("prefill") == prefill and members.get("decode") == decode,
        WAIT_S,
        f"{prefill} prefill and {decode} decode engines",
    )


def test_engines_join_and_leave_under_load(cluster: Composed) -> None:
    with Load(cluster.url).running() as load:
        load.goes_on()
        cluster.up(prefill=2, decode=4)
        _settled(cluster, 2, 4)
        load.goes_on()
        cluster.up(prefill=1, decode=1)
        _settled(cluster, 1, 1)
        load.goes_on()
    load.check()


def test_a_killed_engine_costs_no_request(cluster: Composed) -> None:
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
    load.check()


def test_an_engine_cut_off_its_network_comes_back(cluster: Composed) -> None:
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
    load.check()


def test_several_gateways_share_the_blocks(cluster: Composed) -> None:
    cluster.up(**{"storage-gateway": 2})
    until(lambda: cluster.members().get("storage-gateway") == 2, WAIT_S, "two gateways")
    with Load(cluster.url).running() as load:
        load.goes_on()
        cluster.up(**{"storage-gateway": 1})
        until(lambda: cluster.members().get("storage-gateway") == 1, WAIT_S, "one gateway")
        load.goes_on()
    load.check()


def test_sigterm_ends_a_process_in_good_order(cluster: Composed) -> None:
    gateway = cluster.containers("storage-gateway")[0]
    docker("stop", gateway)
    state = cluster.inspect(gateway)["State"]
    docker("start", gateway)
    assert state["ExitCode"] == 0
    until(lambda: cluster.members().get("storage-gateway") == 1, WAIT_S, "the gateway again")


def test_nics_are_shaped_both_ways(cluster: Composed) -> None:
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
    return float(in_container(sender, "python3", "-c", send))
