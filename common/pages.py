"""What a process says of itself over HTTP (common.health serves it).

/live: its loop runs and it has not failed. /ready: it takes work. /health: what it is, and whom it waits for.
/metrics: its counters and gauges, for Prometheus.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from common.errors import DualPathError, ErrorCode
from common.health import Answer, Page, json_answer
from common.metrics import EXPOSITION_TYPE, Metrics

OK, UNAVAILABLE = 200, 503
LIVE, READY, HEALTH, METRICS = "/live", "/ready", "/health", "/metrics"


class Subject(Protocol):
    """The process."""

    metrics: Metrics

    def not_ready(self) -> DualPathError | None:
        """Why it takes no work now, or None."""

    def facts(self) -> dict[str, Any]:
        """What it is; plain values."""


def pages(subject: Subject) -> dict[str, Page]:
    """By path."""

    async def live() -> Answer:
        error = subject.not_ready()
        failed = error is not None and error.code is ErrorCode.INTERNAL
        return json_answer(UNAVAILABLE if failed else OK, {"status": "failed" if failed else "ok"})

    async def ready() -> Answer:
        status = _status(subject.not_ready())
        return json_answer(OK if status["reason"] is None else UNAVAILABLE, status)

    async def health() -> Answer:
        status = _status(subject.not_ready())
        return json_answer(OK if status["reason"] is None else UNAVAILABLE, {**status, **subject.facts()})

    async def exposition() -> Answer:
        return Answer(OK, await asyncio.to_thread(subject.metrics.exposition), EXPOSITION_TYPE)

    return {LIVE: live, READY: ready, HEALTH: health, METRICS: exposition}


def _status(error: DualPathError | None) -> dict[str, str | None]:
    if error is None:
        return {"status": "ok", "reason": None}
    return {"status": error.code.value, "reason": error.message}
