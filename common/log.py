"""structlog set-up: one line an event, to standard error; console for people, JSON for machines."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def setup_logging(level: str = "info", format: Literal["console", "json"] = "console") -> None:
    """Configure logging for this process. Call once, before the first event."""
    plain = structlog.dev.plain_traceback  # the default would import rich and print every local
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
