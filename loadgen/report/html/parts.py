"""Pieces of the page: a table, an image, a cell."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure

from loadgen.report.html.style import digits, svg
from loadgen.report.html.tables import NOTHING


def cell(value: object) -> str:
    return digits(value) if isinstance(value, int | float) else NOTHING


def table(header: Sequence[str], sets: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """sets: (title or "", rows) each."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [f"<tr>{head}</tr>", "</thead><tbody>"]
    for name, rows in sets:
        if name:
            lines.append(f'<tr class="set"><th colspan="{len(header)}">{escape(name)}</th></tr>')
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="scroll"><table><thead>\n' + "\n".join(lines) + "\n</tbody></table></div>"


def image(name: str, figure: Figure) -> str:
    """Within the page: it needs nothing else."""
    source = base64.b64encode(svg(figure)).decode()
    return f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{source}">'
