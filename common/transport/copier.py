"""Copies between two mapped memories, on a thread of their own: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from common.transport.base import TransferError, check_runs, split_runs
from common.transport.memory import Memory
from common.transport.mover import Job, Mover, Regions, settle
from common.transport.region import RegionDescriptor

#: A copy can be stopped after so many bytes (about 100 microseconds).
PIECE_BYTES = 1 << 20
#: A shorter copy keeps the interpreter lock: getting it back from a busy thread could take longer than the copy.
UNLOCKED_BYTES = 32 << 10
#: A batch of at most so many bytes and runs is copied at once: handing it to the thread would take longer.
INLINE_BYTES = 128 << 10
INLINE_RUNS = 64

_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_unlocked = ctypes.memmove
_move = ctypes.PYFUNCTYPE(*_SIGNATURE)(("memmove", ctypes.pythonapi))


class Stop(threading.Event):
    """Set by whoever does not want the copy any more."""


class Copier:
    """One thread that works off copies in the order in which they come."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="copier")
        self._last: Future[None] | None = None

    @property
    def idle(self) -> bool:
        """The thread has nothing to do; its work comes from the event loop, so nothing begins before that goes on."""
        return self._last is None or self._last.done()

    async def run(self, work: Callable[[Stop], None]) -> None:
        """Run work on the thread. Cancellation sets its stop and returns once it has ended, or at once if it has not
        begun."""
        stop = Stop()
        running = self._last = self._executor.submit(work, stop)
        done = asyncio.wrap_future(running)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            stop.set()
            if not running.cancel():
                await settle(done)
            raise

    def submit(self, work: Callable[[], None]) -> None:
        """Run work on the thread some time."""
        self._last = self._executor.submit(work)

    def close(self) -> None:
        """End the thread. Only when nothing runs."""
        self._executor.shutdown()


class LocalMover(Mover):
    """Writes into regions that are registered here: host-device copies above all."""

    name = "local"

    def __init__(self, copier: Copier, regions: Regions) -> None:
        self._copier = copier
        self._regions = regions

    def reaches(self, target: RegionDescriptor) -> bool:
        return target.key in self._regions

    async def close(self) -> None:
        self._copier.close()

    async def move(self, job: Job) -> None:
        target = self._regions.get(job.batch.target.key)
        if target is None:
            raise TransferError("the target region was deregistered")
        memory = target.memory
        if is_small(job):
            copy(job, memory, Stop())
            return
        await self._copier.run(lambda stop: copy(job, memory, stop))


def is_small(job: Job) -> bool:
    """Not worth the thread."""
    return job.batch.num_bytes <= INLINE_BYTES and len(job.batch.runs) <= INLINE_RUNS


def copy(job: Job, target: Memory, stop: Stop) -> None:
    """Copy all runs. TransferError if a run is out of range, or if stopped or late: no byte is written after that."""
    check_runs(job.batch.runs, job.source.size, target.size)
    if not _copy_runs(job.source.view, target.view, job.batch.runs, job.deadline, stop):
        raise TransferError("stopped or over its deadline in mid-copy")


def _copy_runs(
    source: memoryview, target: memoryview, runs: NDArray[np.int64], deadline: float, stop: Stop
) -> bool:
    # No exception leaves this function: its traceback would keep the two arrays, and with them the mappings, alive.
    from_, to = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    addresses = split_runs(runs, PIECE_BYTES) + np.array([from_.ctypes.data, to.ctypes.data, 0])
    for source_address, target_address, length in addresses.tolist():
        if stop.is_set() or time.monotonic() > deadline:
            return False
        (_move if length < UNLOCKED_BYTES else _move_unlocked)(target_address, source_address, length)
    return True
