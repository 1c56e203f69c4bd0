"""Traces: what a request leaves in all processes, where it goes, how it is shown; free when it is off."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from common import tracing
from common.clock import monotonic
from common.config import TraceConfig, load_config
from common.errors import ConfigError
from common.messages import Member, MemberStatus, Status
from common.tracing import ROOT, UNTRACED, FileTracer, Span, open_tracer, read_spans
from common.types import Role
from services.launcher import top, trace
from services.launcher.commands import app
from tests.lifecycle_harness import client_of, live_cluster

SECOND = 1_000_000_000


def shown(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


async def test_a_request_leaves_its_way_through_all_processes(tmp_path: Path) -> None:
    """Two turns of one session: 600 tokens, then 700 of which 9 blocks are hits. Chunks of 512 tokens."""
    directory = tmp_path / "traces"
    settings = {"trace__dir": str(directory), "prefill__max_batch_tokens": 512, "scheduler__read_side": "de_only"}
    async with live_cluster(tmp_path / "blocks", **settings) as live, client_of(live) as client:
        prompt = [5] * 600
        await client.ask(prompt, 20, stream=True)
        await live.cluster.quiet()
        await client.ask([*prompt, *[6] * 100], 20, stream=False)
        assert client.failed == []
    spans = read_spans(directory)
    first, second = (trace.of_request(spans, root.request) for root in spans if root.name == ROOT)
    assert [span.name for span in first if span.name == "prefill"] == ["prefill"] * 2
    assert sorted({span.name for span in first}) == [
        "allocate", "decode", "handoff", "match", "prefill", "queue", "request",
    ]  # fmt: skip
    by_name = {span.name: span for span in second}
    assert by_name["read"].attributes == {"path": "de", "blocks": 9, "hits": 9}
    assert by_name["read"].process == "decode-0.tm" and by_name["match"].attributes == {"blocks": 9}
    assert by_name["prefill"].attributes == {"cached": 576, "new": 124, "last": True, "batch": 1}
    assert by_name["queue"].attributes["path"] == "de" and by_name["decode"].attributes == {"tokens": 20}
    root = by_name[ROOT]
    assert root.attributes == {
        "outcome": "length", "attempts": 1, "prompt_tokens": 700, "cached_tokens": 576, "completion_tokens": 20,
    }  # fmt: skip
    for span in second:  # the front end's loop clock has milliseconds
        assert root.start_ns - 2e6 <= span.start_ns <= span.end_ns
    order = [by_name[name].end_ns for name in ("match", "queue", "read", "prefill", "handoff", "decode")]
    assert order == sorted(order)


async def test_without_a_destination_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "Span", None)
    async with live_cluster(tmp_path / "blocks") as live, client_of(live) as client:
        await client.ask([5] * 100, 3, stream=False)
        assert client.failed == []
        assert all(service.tracer is UNTRACED for service in live.services)


@given(st.lists(st.text(min_size=1, max_size=10), max_size=50), st.floats(0, 1))
def test_all_processes_choose_the_same_sample(requests: list[str], sample: float) -> None:
    class Kept(tracing._Sampled):
        def __init__(self, process: str) -> None:
            super().__init__(sample, process, "role", "node")
            self.kept: list[str] = []

        def emit(self, span: Span) -> None:
            self.kept.append(span.request)

    one, other = Kept("one"), Kept("other")
    for request in requests:
        one.span("a", request, 0.0)
        other.span("b", request, 1.0)
    assert one.kept == other.kept
    if sample in (0, 1):
        assert one.kept == (requests if sample else [])


async def test_what_a_slow_disk_leaves_no_room_for_is_dropped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING", 3)
    monkeypatch.setattr(tracing, "WRITE_S", 0.05)
    tracer = FileTracer(tmp_path, 1.0, "p/1", "prefill", "n")
    for number in range(5):
        tracer.span("prefill", f"r{number}", monotonic())
    async with asyncio.timeout(5):
        while "spans dropped" not in capsys.readouterr().out:
            await asyncio.sleep(0.02)
    await tracer.close()
    assert [span.request for span in read_spans(tmp_path)] == ["r0", "r1", "r2"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no traces in .*: set trace\.dir"):
        read_spans(tmp_path)
    fields = {name: "x" for name in ("name", "request", "process", "role", "node")}
    whole = json.dumps({**fields, "start_ns": 1, "end_ns": 2, "attributes": {}})
    (tmp_path / "p.spans.jsonl").write_text(f"{whole}\n{whole[:30]}")
    assert len(read_spans(tmp_path)) == 1


@pytest.mark.parametrize("where", ["/proc/none", __file__])
def test_a_directory_that_cannot_be_written_is_one_clear_line(where: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.dir: "):
        open_tracer(TraceConfig(dir=where), "p", "prefill", "n")


def test_traces_go_to_one_place() -> None:
    with pytest.raises(ConfigError, match=r"trace\.dir and trace\.otlp are both set"):
        load_config(None, {"trace.dir": "x", "trace.otlp": "http://127.0.0.1:4318"})


# -- shown --


def span(process: str, start: int, end: int, name: str = "prefill", **attributes: Any) -> Span:
    return Span(name, "r-1", process, "prefill", "n", start * SECOND, end * SECOND, attributes)


def test_events_of_a_lane_are_apart() -> None:
    """By hand: p has 0-4, 1-2, 3-5 and 4-6; the second needs a lane of its own, which the third can have again."""
    spans = [span("p", 0, 4), span("p", 1, 2), span("q", 1, 9), span("p", 3, 5), span("p", 4, 6)]
    events = [event for event in trace.chrome_trace(spans)["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["tid"]) for event in events] == [(1, 0), (1, 1), (2, 0), (1, 1), (1, 0)]
    assert [(event["ts"], event["dur"]) for event in events][3] == (3e6, 2e6)


@given(st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=30))
def test_no_two_events_of_a_lane_overlap(drawn: list[tuple[str, int, int]]) -> None:
    spans = sorted((span(process, start, start + length) for process, start, length in drawn), key=lambda s: s.start_ns)
    lanes: dict[tuple[int, int], float] = {}
    for event in trace.chrome_trace(spans)["traceEvents"]:
        if event["ph"] == "X":
            lane = (event["pid"], event["tid"])
            assert event["ts"] >= lanes.get(lane, 0.0) and event["dur"] >= 0
            lanes[lane] = event["ts"] + event["dur"]


def test_a_request_is_found_by_what_the_client_knows_of_it() -> None:
    spans = [span("p", 0, 4), span("f", 0, 5, ROOT)]
    for known in ("r-1", "r", "cmpl-r-1", "chatcmpl-r-1"):
        assert trace.of_request(spans, known)[0].name == ROOT
    with pytest.raises(ConfigError, match="no spans of request x"):
        trace.of_request(spans, "x")


def test_the_command(tmp_path: Path) -> None:
    async def write() -> None:
        tracer = FileTracer(tmp_path, 1.0, "frontend", "frontend", "n")
        tracer.span(ROOT, "hello-1", monotonic() - 1, outcome="stop", prompt_tokens=7)
        tracer.span("queue", "hello-1", monotonic() - 0.5)
        await tracer.close()

    asyncio.run(write())
    run = CliRunner().invoke
    assert "trace.dir is not set" in run(app, ["trace"]).output
    listed = run(app, ["trace", "--dir", str(tmp_path)])
    assert listed.exit_code == 0 and "hello-1" in listed.output and "stop" in listed.output
    out = tmp_path / "trace.json"
    assert run(app, ["trace", "hello", "--dir", str(tmp_path), "--out", str(out)]).exit_code == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["process_name", "request", "queue"]
    assert run(app, ["trace", "nobody", "--dir", str(tmp_path)]).exit_code == 2


# -- OpenTelemetry --


class Collector(http.server.ThreadingHTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


async def test_a_collector_gets_one_trace_of_all_processes() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'dualpath[otlp]'")
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        config = TraceConfig(otlp=f"http://127.0.0.1:{collector.server_port}/")
        tracers = [open_tracer(config, name, name, "n") for name in ("frontend", "prefill")]
        began = monotonic()
        tracers[1].span("prefill", "r-1", began, began + 1, cached=64)
        tracers[0].span(ROOT, "r-1", began - 1, began + 2, outcome="stop")
        for tracer in tracers:
            await tracer.close()
    finally:
        collector.shutdown()
        collector.server_close()
    found = {}
    for body in collector.bodies:
        message = ExportTraceServiceRequest()
        message.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        for resource in message.resource_spans:
            service = {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                found.update({each.name: (service, each) for each in scope.spans})
    (service, root), (_, part) = found[ROOT], found["prefill"]
    assert service == "dualpath-frontend" and not root.parent_span_id
    assert part.trace_id == root.trace_id and part.parent_span_id == root.span_id
    assert part.end_time_unix_nano - part.start_time_unix_nano == pytest.approx(SECOND, abs=1000)


# -- top --


def status(bytes_read: float, tokens: float, incarnation: str = "1") -> Status:
    nic = "nic_bytes_total{{direction={},intent=kv_load,nic=n0/snic,traffic_class=kv}}"
    manager = Member(Role.TRAFFIC_MANAGER, "decode-0.tm", "tm.1", "", "n0", 1)
    engine = Member(Role.DECODE, "decode-0", f"decode-0.{incarnation}", "", "n0", 1)
    counters = {
        "storage_read_bytes_total": bytes_read,
        "storage_read_path_bytes_total{path=de}": bytes_read,
        nic.format("rx"): 2 * bytes_read,
        "read_queue_tokens": 640.0,
    }
    decode = {"decode_tokens_total": tokens, "decode_running_requests": 3.0}
    return Status([MemberStatus(manager, counters), MemberStatus(engine, decode)], 4, 5)


def test_top_shows_rates_between_two_looks() -> None:
    """By hand: 6 MB and 50 tokens in 2 s."""
    text = shown(top.view(status(1e6, 100), status(7e6, 150), 2.0))
    assert "4 requests waiting, 5 running, 2 processes" in text
    node = next(line for line in text.splitlines() if " n0 " in line)
    assert [cell.strip() for cell in node.split("│")[1:7]] == ["n0", "decode-0", "640", "3.0", "0.0", "6.0 / 0.0"]
    assert "25 tokens/s, 3 running" in text
    assert any("read, de path" in line and " 3.0 " in line for line in text.splitlines())


def test_top_counts_a_restarted_process_from_its_start() -> None:
    assert "30 tokens/s" in shown(top.view(status(0, 100_000), status(0, 60, incarnation="2"), 2.0))
