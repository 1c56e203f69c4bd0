"""Which bytes move where: runs between block slots, layer slots and pages. Pure and vectored.

Row r of a sequence lies in block r // block_size. In a buffer, layer l of the block in slot s starts at
s * full_block_bytes + l * layer_block_bytes. In a layer slot of device memory a sequence's rows are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.blocks.geometry import BlockGeometry
from common.transport.base import make_runs

#: (geometry, slots, layers, start, stop, device offset) -> runs.
RowRuns = Callable[[BlockGeometry, list[int], "Layers", int, int, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Layers:
    """count layers from first on, whose slots of device memory lie stride bytes apart."""

    first: int
    count: int
    stride: int


def _pieces(
    geometry: BlockGeometry, slots: list[int], layers: Layers, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows [start, stop) of each layer, cut at block borders: buffer offsets, device offsets from row 0 of the first
    layer, lengths; all in bytes, [layers * blocks]."""
    size = geometry.block_size
    blocks = np.arange(start // size, -(-stop // size), dtype=np.int64)
    first = np.maximum(blocks * size, start)
    last = np.minimum((blocks + 1) * size, stop)
    base = np.asarray(slots, dtype=np.int64)[blocks] * geometry.full_block_bytes
    index = np.arange(layers.count, dtype=np.int64)[:, None]
    in_buffer = base + (first - blocks * size) * geometry.row_bytes
    in_buffer = in_buffer + (layers.first + index) * geometry.layer_block_bytes
    in_device = first * geometry.row_bytes + index * layers.stride
    length = np.broadcast_to((last - first) * geometry.row_bytes, in_device.shape)
    return in_buffer.ravel(), in_device.ravel(), length.ravel()


def buffer_to_rows(
    geometry: BlockGeometry, slots: list[int], layers: Layers, start: int, stop: int, target: int
) -> NDArray[np.int64]:
    """Runs that load rows [start, stop) of layers; target is the device byte offset of row 0 in the first of them."""
    in_buffer, in_device, length = _pieces(geometry, slots, layers, start, stop)
    return make_runs(in_buffer, target + in_device, length)


def rows_to_buffer(
    geometry: BlockGeometry, slots: list[int], layers: Layers, start: int, stop: int, source: int
) -> NDArray[np.int64]:
    """Runs that store rows [start, stop) of layers; source is the device byte offset of row 0 in the first of them."""
    in_buffer, in_device, length = _pieces(geometry, slots, layers, start, stop)
    return make_runs(source + in_device, in_buffer, length)


class StepRuns:
    """Runs of the same rows in step after step of a forward: built once for each number of layers, then only shifted.

    make: buffer_to_rows or rows_to_buffer. rows: disjoint ranges [start, stop).
    """

    def __init__(self, make: RowRuns, geometry: BlockGeometry, slots: list[int], rows: list[tuple[int, int]]) -> None:
        self._make = make
        self._geometry = geometry
        self._slots = slots
        self._rows = rows
        self._built: dict[int, NDArray[np.int64]] = {}

    def at(self, layers: Layers, device: int) -> NDArray[np.int64]:
        """For these layers, the first of them at device byte offset device."""
        if layers.count not in self._built:
            origin = Layers(0, layers.count, layers.stride)
            self._built[layers.count] = np.concatenate(
                [self._make(self._geometry, self._slots, origin, start, stop, 0) for start, stop in self._rows]
            )
        in_buffer = self._geometry.layer_offset(layers.first)
        shift = (in_buffer, device, 0) if self._make is buffer_to_rows else (device, in_buffer, 0)
        return self._built[layers.count] + np.array(shift, dtype=np.int64)


def block_runs(geometry: BlockGeometry, sources: list[int], targets: list[int]) -> NDArray[np.int64]:
    """Runs that copy Full Blocks from slots (or pages) to pages (or slots)."""
    size = geometry.full_block_bytes
    return make_runs(np.asarray(sources, dtype=np.int64) * size, np.asarray(targets, dtype=np.int64) * size, size)
