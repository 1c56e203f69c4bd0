"""Traces of requests over all processes: spans to a file for each process, to an OpenTelemetry collector, or nowhere.

Every process makes its own spans; nothing travels with a request. They meet because a request's trace, and the span of
the whole request that all others belong to, have ids that follow from the request's own, and so does whether it is one
of the sample. Times are of the host's clock: those of several hosts agree as well as their clocks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.clock import monotonic
from common.config import TraceConfig
from common.errors import ConfigError
from common.log import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

#: The span of a whole request, by its front end.
ROOT = "request"
SUFFIX = ".spans.jsonl"
#: Spans that wait to be written, and seconds between writes.
MAX_WAITING = 10_000
WRITE_S = 0.5

Value = str | int | float | bool


class Tracer(Protocol):
    """Where a process's spans go. Any number of calls a second cost nothing where none are made."""

    def span(self, name: str, request_id: str, start: float, end: float | None = None, **attributes: Value) -> None:
        """Something that was done for a request, from start to end (now), on common.clock.monotonic()."""

    async def close(self) -> None:
        """Everything is written."""


class Untraced:
    """No traces."""

    def span(self, name: str, request_id: str, start: float, end: float | None = None, **attributes: Value) -> None:
        pass

    async def close(self) -> None:
        pass


UNTRACED: Tracer = Untraced()


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it is written: times in nanoseconds since the epoch."""

    name: str
    request: str
    process: str
    role: str
    node: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]

    @property
    def trace_id(self) -> int:
        return int.from_bytes(blake2b(self.request.encode(), digest_size=16).digest())

    @property
    def root_id(self) -> int:
        """The id of the span of the whole request."""
        return int.from_bytes(blake2b(f"{ROOT} {self.request}".encode(), digest_size=8).digest())


class _Sampled:
    """Base: makes spans of the sample and hands them on."""

    def __init__(self, sample: float, process: str, role: str, node: str) -> None:
        self._threshold = int(sample * (1 << 32))
        self._who = (process, role, node)
        self._epoch_ns = time.time_ns() - int(monotonic() * 1e9)

    def span(self, name: str, request_id: str, start: float, end: float | None = None, **attributes: Value) -> None:
        chosen = int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest())
        if chosen < self._threshold:
            times = self._ns(start), self._ns(monotonic() if end is None else end)
            self.emit(Span(name, request_id, *self._who, *times, attributes))

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)

    def emit(self, span: Span) -> None:
        raise NotImplementedError


class FileTracer(_Sampled):
    """To directory/PROCESS.spans.jsonl, a line a span, written by a thread. Spans that a slow disk leaves no room for
    are dropped, and counted in the log."""

    def __init__(self, directory: Path, sample: float, process: str, role: str, node: str) -> None:
        """ConfigError if the file cannot be written."""
        super().__init__(sample, process, role, node)
        path = directory / f"{process.replace(os.sep, '_')}{SUFFIX}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            raise ConfigError(f"trace.dir: {path}: {error.strerror}") from None
        self._waiting: deque[Span] = deque()
        self._dropped = 0
        self._writer: asyncio.Task[None] | None = None

    def emit(self, span: Span) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        self._waiting.append(span)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_regularly(), name="write spans")

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            await asyncio.to_thread(self._write)
            if self._dropped:
                get_logger().warning("spans dropped", spans=self._dropped)
                self._dropped = 0

    def _write(self) -> None:
        while self._waiting:
            span = self._waiting.popleft()
            fields = {name: getattr(span, name) for name in Span.__slots__}
            self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
        self._file.flush()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        with contextlib.suppress(OSError):  # a full disk is no reason not to end in good order
            await asyncio.to_thread(self._write)
            self._file.close()


class OtlpTracer(_Sampled):
    """To an OpenTelemetry collector over HTTP, in batches, by a thread of the SDK."""

    def __init__(self, endpoint: str, sample: float, process: str, role: str, node: str) -> None:
        """ConfigError if the SDK is not installed."""
        super().__init__(sample, process, role, node)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError("trace.otlp needs the OpenTelemetry SDK: pip install 'dualpath[otlp]'") from None
        about = {"service.name": f"dualpath-{role}", "service.instance.id": process, "host.name": node}
        self._resource = Resource.create(about)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))

    def emit(self, span: Span) -> None:
        self._processor.on_end(self._readable(span))

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        root = SpanContext(span.trace_id, span.root_id, is_remote=span.name != ROOT, trace_flags=sampled)
        own = SpanContext(span.trace_id, int.from_bytes(os.urandom(8)) | 1, is_remote=False, trace_flags=sampled)
        is_root = span.name == ROOT
        return ReadableSpan(
            span.name,
            context=root if is_root else own,
            parent=None if is_root else root,
            resource=self._resource,
            attributes={"request.id": span.request, **span.attributes},
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            start_time=span.start_ns,
            end_time=span.end_ns,
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._processor.shutdown)


def open_tracer(config: TraceConfig, process: str, role: str, node: str) -> Tracer:
    """What the configuration asks for. ConfigError if that cannot be had."""
    if config.dir:
        return FileTracer(Path(config.dir), config.sample, process, role, node)
    if config.otlp:
        return OtlpTracer(config.otlp, config.sample, process, role, node)
    return UNTRACED


def read_spans(directory: Path) -> list[Span]:
    """All spans in the files of a directory. ConfigError if there is none; a line that is being written is left out."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(f"no traces in {directory}: set trace.dir (DUALPATH_TRACE__DIR) for every process")
    spans = []
    for file in files:
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                fields: dict[str, Any] = json.loads(line)
                spans.append(Span(**fields))
    return spans
