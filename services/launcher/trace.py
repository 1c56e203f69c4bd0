"""One request's way through the cluster, out of the spans that its processes left (common.tracing)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.tracing import ROOT, Span

if TYPE_CHECKING:
    from rich.table import Table

#: What the API puts before a request's id in its answers.
API_PREFIXES = ("chatcmpl-", "cmpl-")
#: Characters of a bar that stands for the whole time.
BAR = 30
LISTED = 20


def of_request(spans: Iterable[Span], request: str) -> list[Span]:
    """Those of the request with this id, or with ids that begin so, in order of time. ConfigError if there are none."""
    for prefix in API_PREFIXES:
        request = request.removeprefix(prefix)
    found = [span for span in spans if span.request == request or span.request.startswith(request)]
    if not found:
        raise ConfigError(f"no spans of request {request}: `dualpath trace` lists the latest ones")
    return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as trace events for Perfetto and chrome://tracing: a process each, microseconds from the first."""
    zero = min(span.start_ns for span in spans)
    processes = {name: number for number, name in enumerate(dict.fromkeys(span.process for span in spans), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in processes.items()
    ]
    lanes = _lanes(spans)
    for span, lane in zip(spans, lanes, strict=True):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.role,
                "pid": processes[span.process],
                "tid": lane,
                "ts": (span.start_ns - zero) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {"request": span.request, "node": span.node, **span.attributes},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lanes(spans: Sequence[Span]) -> list[int]:
    """A lane of its process for each span, in which nothing else is at the time: viewers want events of one lane to be
    nested or apart. spans: by start."""
    ends: dict[str, list[int]] = {}
    chosen = []
    for span in spans:
        busy = ends.setdefault(span.process, [])
        lane = next((index for index, end in enumerate(busy) if end <= span.start_ns), len(busy))
        busy[lane : lane + 1] = [span.end_ns]
        chosen.append(lane)
    return chosen


def waterfall(spans: Sequence[Span]) -> Table:
    """One row a span, with its share of the time as a bar."""
    from rich.table import Table

    zero, last = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    rows = []
    for span in spans:
        what = " ".join(f"{key}={value}" for key, value in span.attributes.items())
        start, length = (span.start_ns - zero) / 1e6, (span.end_ns - span.start_ns) / 1e6
        bar = _bar(span.start_ns - zero, span.end_ns - zero, last - zero)
        rows.append((span.name, span.process, f"{start:,.1f}", f"{length:,.1f}", bar, what))
    table = Table(title=", ".join(dict.fromkeys(span.request for span in spans)), title_justify="left")
    for index, name in enumerate(("span", "process", "from, ms", "ms", "", "what")):
        told = name == "what"  # takes what room there is
        width = None if told else max(len(name), *(len(row[index]) for row in rows))
        table.add_column(name, justify="right" if "ms" in name else "left", no_wrap=not told, min_width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _bar(start: int, stop: int, total: int) -> str:
    first = min(BAR * start // max(total, 1), BAR - 1)
    last = max(-(-BAR * stop // max(total, 1)), first + 1)
    return " " * first + "━" * (last - first)


def latest(spans: Iterable[Span]) -> Table:
    """The last requests that ended."""
    from rich.table import Table

    table = Table(title="latest requests", title_justify="left")
    for name in ("request", "outcome", "ms", "prompt", "cached", "completion"):
        table.add_column(name, justify="left" if name in ("request", "outcome") else "right")
    roots = sorted((span for span in spans if span.name == ROOT), key=lambda span: span.end_ns)
    for span in roots[-LISTED:]:
        facts = span.attributes
        tokens = [str(facts.get(f"{name}_tokens", "")) for name in ("prompt", "cached", "completion")]
        took = f"{(span.end_ns - span.start_ns) / 1e6:,.1f}"
        table.add_row(span.request, str(facts.get("outcome", "")), took, *tokens)
    return table
