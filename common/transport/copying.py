"""Copies of runs from one memory of this process into another, in as few steps of Python as there can be.

Many short runs of one length, the Layer Blocks of many slots above all, are gathered and scattered as arrays of records
of that length: one step for RECORDS_BYTES of them instead of one a run. Long runs are moved one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.transport.base import split_runs

#: A copy can be stopped after about so many bytes (about 100 microseconds).
PIECE_BYTES = 1 << 20
#: Runs up to this length, and at least so many of a length, are copied as records: each byte moves twice, but
#: in between it stays in the processor's cache.
RECORD_BYTES = 8 << 10
MIN_RECORDS = 16
RECORDS_BYTES = 256 << 10
#: A shorter copy keeps the interpreter lock: getting it back from a busy thread could take longer than the copy.
UNLOCKED_BYTES = 32 << 10

_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_unlocked = ctypes.memmove
_move = ctypes.PYFUNCTYPE(*_SIGNATURE)(("memmove", ctypes.pythonapi))

Bytes = NDArray[np.uint8]


def copy_runs(
    source: memoryview, target: memoryview, runs: NDArray[np.int64], go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Copy runs (source offset, target offset, length), which the caller has checked to lie inside and not to overlap
    on the target side, in no order. False once go_on says so: no byte is written after that.

    No exception leaves this function: its traceback would keep the memories alive, and they could not be closed.
    """
    from_, to = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    alike, others = _by_length(runs)
    return all(_copy_records(from_, to, records, go_on) for records in alike) and _copy_singly(from_, to, others, go_on)


def _by_length(runs: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Runs of one length each that are worth copying as records, and all others."""
    lengths = runs[:, 2]
    if len(runs) < MIN_RECORDS or lengths.min() > RECORD_BYTES:
        return [], runs
    if lengths.min() == lengths.max():
        return [runs], runs[:0]
    runs = runs[np.argsort(lengths, kind="stable")]
    starts = np.flatnonzero(np.diff(runs[:, 2], prepend=-1))
    counts = np.diff(starts, append=len(runs))
    worth = (counts >= MIN_RECORDS) & (runs[starts, 2] <= RECORD_BYTES)
    alike = [runs[start : start + count] for start, count in zip(starts[worth], counts[worth], strict=True)]
    return alike, runs[np.repeat(~worth, counts)]


def _copy_records(from_: Bytes, to: Bytes, runs: NDArray[np.int64], go_on: Callable[[], bool]) -> bool:
    length = int(runs[0, 2])
    sources, targets = _records(from_, length), _records(to, length)
    step = RECORDS_BYTES // length
    for first in range(0, len(runs), step):
        if not go_on():
            return False
        part = runs[first : first + step]
        targets[part[:, 1]] = sources[part[:, 0]]
    return True


def _records(memory: Bytes, length: int) -> NDArray[np.void]:
    """Every record of length bytes that memory holds, by its offset: a view in which neighbours overlap."""
    return np.ndarray((memory.size - length + 1,), f"V{length}", memory.data, strides=(1,))


def _copy_singly(from_: Bytes, to: Bytes, runs: NDArray[np.int64], go_on: Callable[[], bool]) -> bool:
    addresses = split_runs(runs, PIECE_BYTES) + np.array([from_.ctypes.data, to.ctypes.data, 0])
    since_asked = PIECE_BYTES
    for source_address, target_address, length in addresses.tolist():
        since_asked += length
        if since_asked > PIECE_BYTES:
            if not go_on():
                return False
            since_asked = length
        (_move if length < UNLOCKED_BYTES else _move_unlocked)(target_address, source_address, length)
    return True
