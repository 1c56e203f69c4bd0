"""Which bytes move where: runs between block slots, layer slots and pages. Pure and vectored.

Row r of a sequence lies in block r // block_size. In a buffer, layer l of the block in slot s starts at
s * full_block_bytes + l * layer_block_bytes. In a layer slot of device memory a sequence's rows are contiguous.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.blocks.geometry import BlockGeometry
from common.transport.base import make_runs


def _pieces(
    geometry: BlockGeometry, slots: list[int], layer: int, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows [start, stop) of one layer, cut at block borders: buffer byte offsets, first rows, lengths in bytes."""
    size = geometry.block_size
    blocks = np.arange(start // size, -(-stop // size), dtype=np.int64)
    first = np.maximum(blocks * size, start)
    last = np.minimum((blocks + 1) * size, stop)
    base = np.asarray(slots, dtype=np.int64)[blocks] * geometry.full_block_bytes + geometry.layer_offset(layer)
    return base + (first - blocks * size) * geometry.row_bytes, first, (last - first) * geometry.row_bytes


def buffer_to_rows(
    geometry: BlockGeometry, slots: list[int], layer: int, start: int, stop: int, target: int
) -> NDArray[np.int64]:
    """Runs that load rows [start, stop) of a layer; target is the device byte offset of the sequence's row 0."""
    offsets, first, length = _pieces(geometry, slots, layer, start, stop)
    return make_runs(offsets, target + first * geometry.row_bytes, length)


def rows_to_buffer(
    geometry: BlockGeometry, slots: list[int], layer: int, start: int, stop: int, source: int
) -> NDArray[np.int64]:
    """Runs that store rows [start, stop) of a layer; source is the device byte offset of the sequence's row 0."""
    offsets, first, length = _pieces(geometry, slots, layer, start, stop)
    return make_runs(source + first * geometry.row_bytes, offsets, length)


def block_runs(geometry: BlockGeometry, sources: list[int], targets: list[int]) -> NDArray[np.int64]:
    """Runs that copy Full Blocks from slots (or pages) to pages (or slots)."""
    size = geometry.full_block_bytes
    return make_runs(
        np.asarray(sources, dtype=np.int64) * size, np.asarray(targets, dtype=np.int64) * size, size
    )
