"""Runs between block slots and device rows, against a copy row by row (pure)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.blocks.geometry import attention_geometry
from services.traffic_manager.runs import Layers, StepRuns, block_runs, buffer_to_rows, rows_to_buffer

GEOMETRY = attention_geometry(num_layers=5, block_size=4, kv_heads=1, head_dim=1, dtype="uint8")  # rows of 2 bytes
SLOTS = [3, 0, 5, 1]
ROWS = len(SLOTS) * GEOMETRY.block_size


def in_buffer(layer: int, row: int) -> int:
    """Byte offset of a row of the sequence in the buffer."""
    block, offset = divmod(row, GEOMETRY.block_size)
    start = SLOTS[block] * GEOMETRY.full_block_bytes + layer * GEOMETRY.layer_block_bytes
    return start + offset * GEOMETRY.row_bytes


def apply(runs: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    for from_, to, length in runs.tolist():
        target[to : to + length] = source[from_ : from_ + length]


@settings(deadline=None)
@given(
    first=st.integers(0, 4),
    count=st.integers(1, 3),
    rows=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted),
    device=st.integers(0, 9),
    spare=st.integers(0, 5),
    load=st.booleans(),
)
def test_every_row_goes_to_its_place_and_no_other_byte_changes(first, count, rows, device, spare, load):
    count = min(count, GEOMETRY.num_layers - first)
    start, stop = rows
    stride = (ROWS + spare) * GEOMETRY.row_bytes
    layers = Layers(first, count, stride)
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 256, 6 * GEOMETRY.full_block_bytes, dtype=np.uint8)
    memory = rng.integers(0, 256, device + GEOMETRY.num_layers * stride, dtype=np.uint8)
    expected_buffer, expected_memory = buffer.copy(), memory.copy()
    for layer in range(count):
        for row in range(start, stop):
            b = slice(in_buffer(first + layer, row), in_buffer(first + layer, row) + GEOMETRY.row_bytes)
            offset = device + layer * stride + row * GEOMETRY.row_bytes
            d = slice(offset, offset + GEOMETRY.row_bytes)
            if load:
                expected_memory[d] = buffer[b]
            else:
                expected_buffer[b] = memory[d]
    make = buffer_to_rows if load else rows_to_buffer
    direct = make(GEOMETRY, SLOTS, layers, start, stop, device)
    shifted = StepRuns(make, GEOMETRY, SLOTS, [(start, stop)]).at(layers, device)
    assert direct.tolist() == shifted.tolist()
    apply(direct, buffer if load else memory.copy(), memory if load else buffer)
    assert (memory == expected_memory).all() and (buffer == expected_buffer).all()


def test_whole_blocks_that_continue_one_another_are_one_run():
    size = GEOMETRY.full_block_bytes
    assert block_runs(GEOMETRY, [4, 5, 9], [1, 2, 3]).tolist() == [
        [4 * size, size, 2 * size],
        [9 * size, 3 * size, size],
    ]
