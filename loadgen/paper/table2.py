"""Table 2: our synthetic trajectories, measured as the paper's sets are."""

from __future__ import annotations

from common.workload.synthetic import CHOICES, SET_SIZE, generate
from common.workload.table2 import TABLE2, fit_table
from loadgen.paper.exhibit import Exhibit, Row

#: Of columns that are not lengths.
UNITS = {"turns": ""}


def table2() -> Exhibit:
    rows = []
    for name, columns in TABLE2.items():
        for told in fit_table(generate(name, SET_SIZE), columns):
            unit = UNITS.get(told.column, "tokens")
            rows.append(Row(f"table2_{name}_{told.column}", f"{name}: {told.column}", unit, told.ours))
    return Exhibit("table2", "Trajectory sets", rows, notes=(f"the sets are made to fit the table; {CHOICES}",))
