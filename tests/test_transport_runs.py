"""Runs of batches: joined where they continue one another, cut where they are too long."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transport.base import make_runs, split_runs


@settings(deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=20),
    limit=st.integers(1, 12),
)
def test_joining_and_splitting_runs_keeps_every_byte(runs: list[tuple[int, int, int]], limit: int) -> None:
    def bytes_of(table: np.ndarray) -> list[tuple[int, int]]:
        return [(source + i, target + i) for source, target, length in table.tolist() for i in range(length)]

    table = np.array(runs, dtype=np.int64)
    joined = make_runs(*table.T)
    cut = split_runs(joined, limit)
    assert bytes_of(joined) == bytes_of(cut) == bytes_of(table)
    assert len(cut) == 0 or (cut[:, 2].min() > 0 and cut[:, 2].max() <= limit)
