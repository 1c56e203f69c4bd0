"""Copies between two mapped memories, on a thread of their own: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from common.tasks import settle
from common.transport.base import TransferError, check_runs
from common.transport.copying import copy_runs
from common.transport.files import FileJob, read_parts
from common.transport.memory import Memory
from common.transport.mover import Job, Mover, Regions
from common.transport.region import RegionDescriptor

#: A batch of at most so many bytes and runs is copied at once: handing it to the thread would take longer.
INLINE_BYTES = 512 << 10
INLINE_RUNS = 256


class Stop(threading.Event):
    """Set by whoever does not want the copy any more."""

    def before(self, deadline: float) -> Callable[[], bool]:
        """Whether to go on: it is neither set, nor is the deadline (time.monotonic) over."""
        return lambda: not self.is_set() and time.monotonic() <= deadline


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
    takes_files = True

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

    async def move_files(self, job: FileJob) -> None:
        target = self._regions.get(job.batch.target.key)
        if target is None:
            raise TransferError("the target region was deregistered")
        memory = target.memory
        await self._copier.run(lambda stop: read_parts(job, memory, stop.before(job.deadline)))


def is_small(job: Job) -> bool:
    """Not worth the thread."""
    return job.batch.num_bytes <= INLINE_BYTES and len(job.batch.runs) <= INLINE_RUNS


def copy(job: Job, target: Memory, stop: Stop) -> None:
    """Copy all runs. TransferError if a run is out of range, or if stopped or late: no byte is written after that."""
    check_runs(job.batch.runs, job.source.size, target.size)
    if not copy_runs(job.source.view, target.view, job.batch.runs, stop.before(job.deadline)):
        raise TransferError("stopped or over its deadline in mid-copy")
