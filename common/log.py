"""structlog set-up: one line an event, to standard error; console for people, JSON for machines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let an optional import of module fail, unless it is loaded anyway."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


with _hidden("rich"):  # structlog loads it where it is installed, some MB a process, for tracebacks that we print plain
    import structlog

get_logger = structlog.get_logger


def setup_logging(level: str = "info", format: Literal["console", "json"] = "console") -> None:
    """Configure logging for this process. Call once, before the first event."""
    plain = structlog.dev.plain_traceback
    renderers: dict[str, list[structlog.types.Processor]] = {
        "console": [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain)],
        "json": [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
    }
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            *renderers[format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
