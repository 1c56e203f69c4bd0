"""Files of one JSON object a line: reading them, and refusing all their bad rows at once, with line numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError

_SHOWN = 5

T = TypeVar("T")


class BadRow(Exception):
    """Why a line is refused."""


def read_rows(path: Path, what: str, advice: str, parse: Callable[[Iterable[str], str], T]) -> T:
    """parse(lines, name of the file). ConfigError if it cannot be read: what it is, why, and the advice."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse(lines, str(path))
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}: {advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def json_object(line: str) -> dict[str, Any]:
    """The object on a line. BadRow if there is none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadRow(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    return row


def refuse(what: str, source: str, bad: Sequence[str]) -> None:
    """ConfigError that names the first of the bad rows, if there are any."""
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ConfigError(f"{what} {source}: {len(bad)} bad rows: {'; '.join(bad[:_SHOWN])}{more}")
