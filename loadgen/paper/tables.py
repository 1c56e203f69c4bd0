"""What `loadgen paper` says to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from loadgen.paper.calibration import CALIBRATIONS
from loadgen.paper.exhibit import EXPLAIN_ABOVE_PERCENT, Exhibit, Row, ratios, unexplained
from loadgen.paper.published import PUBLISHED, Role
from loadgen.report.text import number


def print_exhibit(exhibit: Exhibit, console: Console) -> None:
    """Ours beside the published, with what each row is."""
    table = Table(title=f"{exhibit.name}: {exhibit.title}", title_justify="left")
    table.add_column("what")
    for name in ("ours", "published", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("published number is", no_wrap=True)
    for row in exhibit.rows:
        table.add_row(row.what, number(row.ours), *_published(row), row.unit, _role(row))
    console.print(table)
    for line in [*exhibit.notes, *(f"{row.what}: {row.reason}" for row in exhibit.rows if row.reason)]:
        console.print(line, markup=False, highlight=False)


def _published(row: Row) -> tuple[str, str]:
    if row.published is None:
        return "-", ""
    form = PUBLISHED[row.name].form
    off = row.difference_percent
    return f"{form} {number(row.published)}".strip(), "" if off is None else f"{off:+.1f} %"


def _role(row: Row) -> str:
    return "" if row.role is Role.NONE else row.role.value


def print_calibration(console: Console) -> None:
    """Constants that were fitted, to what; all else is held out."""
    table = Table(title="Calibration: constants that were fitted", title_justify="left")
    for name in ("calibration", "constant", "fitted", "default", "to"):
        table.add_column(name)
    for name, calibration in CALIBRATIONS.items():
        told = calibration.describe()
        for constant, values in told["constants"].items():
            default = values["default"]
            cells = (f"{values['fitted']:.4g}", "-" if default is None else f"{default:.4g}")
            table.add_row(name, constant, *cells, ", ".join(told["fitted_to"]))
    console.print(table)


def print_heldout(exhibits: Sequence[Exhibit], console: Console) -> None:
    """How far the numbers are off that nothing was fitted to, and which of them without a reason."""
    told = ratios(exhibits)
    if "heldout_count" not in told:
        return
    console.print(
        f"held out: {told['heldout_count']:.0f} published numbers; off by {told['heldout_median_error']:.1%} in the"
        f" median, {told['heldout_max_error']:.1%} at most",
        highlight=False,
    )
    for name in unexplained(_rows(exhibits)):
        console.print(f"off by more than {EXPLAIN_ABOVE_PERCENT:g} %, unexplained: {name}", highlight=False)


def _rows(exhibits: Iterable[Exhibit]) -> list[Row]:
    return [row for exhibit in exhibits for row in exhibit.rows]
