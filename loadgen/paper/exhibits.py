"""All tables and figures, by the names that the command takes."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.paper.cases import Runner
from loadgen.paper.exhibit import Exhibit
from loadgen.paper.figure3 import figure3
from loadgen.paper.fitting import calibrate
from loadgen.paper.offline import ablation, figure7, figure8, figure9
from loadgen.paper.online import breakdown, figure10, figure11, working_set
from loadgen.paper.scale import figure13, figure14, figure15, table3
from loadgen.paper.table1 import table1
from loadgen.paper.table2 import table2


def figure12(runner: Runner) -> Exhibit:
    left, right = breakdown(runner), ablation(runner)
    return Exhibit(
        "fig12",
        "Parts of TTFT online; ablation offline (ds-660b, 64K)",
        [*right.rows, *left.rows],
        runs=[*left.runs, *right.runs],
    )


EXHIBITS: dict[str, Callable[[Runner], Exhibit]] = {
    "table1": lambda runner: table1(),
    "table2": lambda runner: table2(),
    "fig3": lambda runner: figure3(),
    "table3": table3,
    "fig7": figure7,
    "fig8": figure8,
    "fig9": figure9,
    "fig10": figure10,
    "fig11": figure11,
    "fig12": figure12,
    "fig13": figure13,
    "fig14": figure14,
    "fig15": figure15,
    "workingset": working_set,
}
#: Not among all: it finds the constants that all others use.
CALIBRATE = {"calibrate": calibrate}
