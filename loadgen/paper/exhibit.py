"""One table or figure: what we get, beside what the paper has where it says so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from loadgen.paper.published import PUBLISHED, Role

#: Above this a difference from a held-out number needs a reason by name.
EXPLAIN_ABOVE_PERCENT = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number. name: a key of PUBLISHED, or any other for one that the paper does not give. ours: None where nothing
    could be measured. why: the reason of a difference, should it be large."""

    name: str
    what: str
    unit: str
    ours: float | None
    why: str = ""

    @property
    def published(self) -> float | None:
        told = PUBLISHED.get(self.name)
        return told.value if told else None

    @property
    def role(self) -> Role:
        told = PUBLISHED.get(self.name)
        return told.role if told else Role.NONE

    @property
    def difference_percent(self) -> float | None:
        if self.published is None or self.ours is None:
            return None
        return 100 * (self.ours / self.published - 1)

    @property
    def reason(self) -> str:
        """why, if there is a large difference to explain."""
        off = self.difference_percent
        return self.why if off is not None and abs(off) > EXPLAIN_ABOVE_PERCENT else ""

    def describe(self) -> dict[str, Any]:
        told = PUBLISHED.get(self.name)
        return {
            **asdict(self),
            "why": self.reason,
            "published": self.published,
            "form": told.form if told else "",
            "source": told.source if told else "",
            "role": self.role.value,
            "difference_percent": self.difference_percent,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """Points to draw, in order. x: numbers, or names of bars."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes to draw lines in; bars where x are names."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or figure. runs: results of simulations, as loadgen.report.html reads them."""

    name: str
    title: str
    rows: Sequence[Row]
    panels: Sequence[Panel] = ()
    runs: Sequence[dict[str, Any]] = ()
    notes: Sequence[str] = ()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "rows": [row.describe() for row in self.rows],
            "panels": [asdict(panel) for panel in self.panels],
            "notes": list(self.notes),
        }


def ratios(exhibits: Iterable[Exhibit]) -> dict[str, float]:
    """The flat map: every number by its name; then how far the held-out ones are off, as shares (0.1 is 10 %): their
    median and maximum, and how many there are."""
    rows = [row for exhibit in exhibits for row in exhibit.rows if row.ours is not None]
    flat = {row.name: row.ours for row in rows if row.ours is not None}
    if errors := list(heldout_errors(rows).values()):
        flat |= {
            "heldout_median_error": median(errors),
            "heldout_max_error": max(errors),
            "heldout_count": float(len(errors)),
            "heldout_unexplained": float(len(unexplained(rows))),
        }
    return flat


def heldout_errors(rows: Iterable[Row]) -> dict[str, float]:
    """Differences from held-out numbers, as shares, each name once."""
    return {
        row.name: abs(row.difference_percent) / 100
        for row in rows
        if row.role is Role.HELD_OUT and row.difference_percent is not None
    }


def unexplained(rows: Iterable[Row]) -> list[str]:
    """Held-out numbers that are far off, and nobody says why."""
    return [
        row.name
        for row in rows
        if row.role is Role.HELD_OUT
        and row.difference_percent is not None
        and abs(row.difference_percent) > EXPLAIN_ABOVE_PERCENT
        and not row.why
    ]
