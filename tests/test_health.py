"""What processes tell operators over HTTP, and that nobody can disturb them by asking."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common import health
from common.config import Config
from common.errors import ConfigError
from common.health import Answer, HealthServer, json_answer
from common.messages import GetStatus, Status
from common.service import Service
from services.prefill.service import PrefillEngine
from tests.cluster import Cluster, cluster_config, run_cluster
from tests.lifecycle_harness import client_of, live_cluster

FAST = {"perf__time_factor": 0.05}


async def get(service: Service, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(service.health.url + path, timeout=10)


# -- the server by itself --


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    async def page() -> Answer:
        return json_answer(200, {"status": "ok"})

    server = HealthServer("127.0.0.1", 0, {"/live": page})
    await server.start()
    yield server
    await server.close()


async def raw(server: HealthServer, sent: bytes) -> bytes:
    """Everything that comes back for these bytes."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /live?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /live HTTP/1.1\r\n\r\n", 200),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /live HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /live\r\n\r\n", 400),
        (b"\x00\xff\xfe garbage\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    ],
)
async def test_every_request_has_one_answer(server: HealthServer, sent: bytes, status: int) -> None:
    head, _, body = (await raw(server, sent)).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"Connection: close" in head
    length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
    assert length > 0
    if sent.startswith(b"HEAD"):
        assert body == b""
    else:
        assert len(body) == length and json.loads(body)


async def test_a_client_that_sends_nothing_is_cut_off(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "EXCHANGE_S", 0.2)
    assert await raw(server, b"GET /live HT") == b""


async def test_connections_are_bounded(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 2)
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    waiting = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    await asyncio.sleep(0.1)
    with pytest.raises(ConnectionResetError):
        if await raw(server, b"GET /live HTTP/1.1\r\n\r\n") == b"":
            raise ConnectionResetError
    for _, writer in waiting:
        writer.close()
    await asyncio.sleep(0.1)
    assert (await raw(server, b"GET /live HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_port_in_use_is_one_clear_line(server: HealthServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*; set health\.host and health\.port"):
        await HealthServer("127.0.0.1", port, {}).start()


# -- processes --


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(cluster_config("ds-27b", tmp_path, **FAST), prefill=2) as cluster:
        yield cluster


async def test_every_process_has_its_pages(cluster: Cluster) -> None:
    assert cluster.driver is not None
    await cluster.driver.generate([5] * 200, 3)
    for service in cluster.services:
        for path in ("/live", "/ready"):
            answer = await get(service, path)
            assert answer.status_code == 200 and answer.json()["status"] == "ok", (service.name, path, answer.text)
        facts = (await get(service, "/health")).json()
        assert (facts["name"], facts["role"], facts["status"]) == (service.name, service.role.value, "ok")
        assert facts["waits_for"] == []
        scraped = await get(service, "/metrics")
        assert scraped.headers["content-type"].startswith("text/plain; version=")
        names = {family.name for family in text_string_to_metric_families(scraped.text)}
        assert {"dualpath_event_loop_lag_seconds", "dualpath_process_info", "process_cpu_seconds"} <= names
    decoded = (await get(cluster.decode(), "/metrics")).text
    assert "dualpath_decode_tokens_total 2.0" in decoded


async def test_members_say_where_their_pages_are(cluster: Cluster) -> None:
    for member in cluster.scheduler.registry.all():
        assert member.health.startswith("http://127.0.0.1:")
    assert len({member.health for member in cluster.scheduler.registry.all()}) == len(cluster.services) - 1


async def test_a_draining_process_is_alive_but_takes_nothing(cluster: Cluster) -> None:
    engine = cluster.prefill(1)
    cluster.engines.pop(engine.name)
    go_on = asyncio.Event()

    async def drain() -> None:
        await go_on.wait()

    engine.drain = drain  # type: ignore[method-assign]
    stopping = asyncio.create_task(engine.stop())
    async with asyncio.timeout(5):
        while (answer := await get(engine, "/ready")).status_code == 200:
            await asyncio.sleep(0.02)
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    assert (await get(engine, "/live")).status_code == 200
    assert cluster.driver is not None
    status: Status = await cluster.driver.scheduler.call(GetStatus(), 5.0)
    assert [entry.member.name for entry in status.members if entry.leaving] == ["prefill-1"]
    go_on.set()
    await stopping
    with pytest.raises(httpx.ConnectError):
        await get(engine, "/live")
    await cluster.traffic_managers.pop(engine.name).stop()


async def test_a_process_that_waits_for_the_scheduler_is_alive_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = {"scheduler__control": "tcp://127.0.0.1:1", "timeouts__register_s": 30.0}
    config = cluster_config("ds-27b", tmp_path, **FAST, **control)

    async def no_traffic_manager() -> str:
        raise AssertionError("not reached")

    class Waiting(PrefillEngine):
        async def open(self) -> None:
            pass

        def describe(self, member: Any) -> Any:
            return member

    engine = Waiting(config, "prefill-0", no_traffic_manager)
    starting = asyncio.create_task(engine.start())
    try:
        async with asyncio.timeout(10):
            while not engine.health.url:
                await asyncio.sleep(0.02)
            while "waiting for the scheduler" not in capsys.readouterr().out:
                await asyncio.sleep(0.05)
        assert (await get(engine, "/live")).status_code == 200
        answer = await get(engine, "/ready")
        assert answer.status_code == 503 and answer.json()["reason"] == "prefill-0 is starting"
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.stop(drain=False)


async def test_liveness_of_a_decode_engine_does_not_depend_on_a_prefill_engine(cluster: Cluster) -> None:
    """A40: a dead prefill engine makes nobody else unhealthy."""
    for service in (cluster.engines.pop("prefill-1"), cluster.traffic_managers.pop("prefill-1")):
        service._registered = False  # it dies without a word
        await service.stop(drain=False)
    for path in ("/live", "/ready", "/health"):
        assert (await get(cluster.decode(), path)).status_code == 200


async def test_a_failed_process_is_not_alive(cluster: Cluster) -> None:
    engine = cluster.prefill(1)
    engine.fail(RuntimeError("broken"))
    answer = await get(engine, "/live")
    assert answer.status_code == 503 and answer.json()["status"] == "failed"
    engine.failure = None  # as it should


def test_the_pages_are_on_loopback_by_default() -> None:
    """F02."""
    assert Config().health.host == "127.0.0.1" and Config().health.port == 0


# -- the style of names (Prometheus: metric and label naming) --

UNITS = {"seconds", "bytes", "tokens", "ratio"}
NOT_BASE_UNITS = {"ms", "milliseconds", "us", "minutes", "kb", "mb", "kib", "mib", "percent", "bits"}


def faults_of(name: str, kind: str, documentation: str, labels: set[str]) -> list[str]:
    """What is wrong with a metric by the field's rules."""
    base = name.removesuffix("_total")
    words = base.split("_")
    return [
        rule
        for rule, broken in (
            ("has the application's prefix", not re.fullmatch(r"(dualpath|process)_[a-z][a-z0-9]*(_[a-z0-9]+)*", name)),
            ("a counter ends in _total", (kind == "counter") != name.endswith("_total")),
            ("the unit comes last", any(word in UNITS for word in words[:-1])),
            ("units are base units", any(word in NOT_BASE_UNITS for word in words)),
            ("no suffix that a type adds", words[-1] in ("count", "sum", "bucket")),
            ("labels are not in the name, but for its subject", bool(labels & set(words[2:]))),
            ("labels are snake case", not all(re.fullmatch(r"[a-z][a-z_]*", label) for label in labels)),
            ("is explained", not documentation or documentation.endswith(".")),
        )
        if broken
    ]


def test_rules_that_can_fail() -> None:
    assert faults_of("dualpath_storage_bytes_read_total", "counter", "Bytes", set()) == ["the unit comes last"]
    assert faults_of("dualpath_reads", "counter", "Reads", set()) == ["a counter ends in _total"]
    assert faults_of("dualpath_lag_ms", "gauge", "Lag", set()) == ["units are base units"]
    assert faults_of("lag_seconds", "gauge", "Lag.", {"Node"}) == [
        "has the application's prefix", "labels are snake case", "is explained",
    ]  # fmt: skip
    assert faults_of("dualpath_event_loop_lag_seconds", "gauge", "Lag", {"role"}) == []


async def test_metrics_are_named_as_the_field_does(tmp_path: Path) -> None:
    async with live_cluster(tmp_path) as live, client_of(live) as client:
        await client.ask([5] * 200, 70, stream=True)
        assert client.failed == []
        collected = [family for service in live.services for family in service.metrics.registry.collect()]
    seen: dict[str, tuple[str, set[str]]] = {}
    wrong = {}
    for family in collected:
        if not family.name.startswith("process_"):  # those are the client library's own
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            if faults := faults_of(name, family.type, family.documentation, labels):
                wrong[name] = faults
            kind, known = seen.setdefault(name, (family.type, set()))
            assert kind == family.type, f"{name} is a {kind} in one process and a {family.type} in another"
            known |= labels
    assert not wrong and len(seen) > 40
    waits = {"first_token", "second_token"}
    assert {f"dualpath_time_to_{wait}_seconds" for wait in waits} < seen.keys()
