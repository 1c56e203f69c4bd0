"""One finding of the doctor. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """OK: as it should be. WARN: it works, but not well, or not yet. FAIL: a process would not start, or not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """found: what there is; fix: what to do about it, where the level is not OK."""

    name: str
    level: Level
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.name}: {self.found}" + (f" -> {self.fix}" if self.fix else "")


def judged(name: str, found: str, *verdicts: tuple[bool, Level, str]) -> Check:
    """The first of (holds, level, fix) that holds decides; without one it is OK."""
    for holds, level, fix in verdicts:
        if holds:
            return Check(name, level, found, fix)
    return Check(name, Level.OK, found)


def healthy(checks: Iterable[Check]) -> bool:
    return all(check.level is not Level.FAIL for check in checks)


def show_bytes(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} TiB"
