"""A process's end of the data plane on one interface: everything that all kinds of transport have in common.

It names regions, checks batches, picks the mover that reaches the target, bounds transfers in number and time, counts
them, and holds the fault seam; the NICs pace them, and the movers (local, shm, tcp, null) do the rest.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from common.faults import Fault, Faults
from common.metrics import Metrics
from common.tasks import settle
from common.transport.base import Batch, FileBatch, Intent, TransferError, check_runs
from common.transport.classes import CLASS_OF_INTENT, TRAFFIC_CLASSES
from common.transport.files import FileJob, check_places
from common.transport.memory import REGION_KEY_BYTES, Memory, host_identity
from common.transport.mover import Job, Mover, Region, Regions
from common.transport.nic import Nic, Nics
from common.transport.region import RegionDescriptor

J = TypeVar("J", Job, FileJob)

#: Transfers of one class that may be in flight at a time: a flood of one does not keep the others out.
MAX_TRANSFERS = 4096


class TaskTransfer:
    """A transfer that runs as a task. Nobody has to await it."""

    def __init__(self, work: Coroutine[None, None, None], name: str) -> None:
        self.task = asyncio.create_task(work, name=name)
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # taken note of

    def __await__(self) -> Generator[None, None, None]:
        return self._result().__await__()

    async def _result(self) -> None:
        await asyncio.wait({self.task})
        try:
            self.task.result()
        except asyncio.CancelledError as cancelled:
            raise TransferError(str(cancelled) or "cancelled") from None

    async def cancel(self) -> None:
        if not self.task.cancelling():
            self.task.cancel()
        await settle(self.task)


@dataclass(slots=True)
class Queue:
    """Transfers of one class that have begun and not ended."""

    transfers: int = 0
    num_bytes: int = 0


class Endpoint:
    """A Transport. local serves regions registered here, the first of the remote movers that reaches it any other."""

    def __init__(
        self,
        regions: Regions,
        local: Mover,
        remote: Sequence[Mover],
        metrics: Metrics,
        faults: Faults,
        transfer_s: float,
        nic: Nic | None = None,
    ) -> None:
        self._nic = nic
        self._nics = Nics(nic, metrics)
        self._regions = regions
        self._local = local
        self._remote = remote
        self._faults = faults
        self._transfer_s = transfer_s
        self._open = True
        self._transfers: dict[asyncio.Task[None], RegionDescriptor] = {}  # and their targets
        self._queues = {traffic_class: Queue() for traffic_class in TRAFFIC_CLASSES}
        self._show_queues(metrics)
        labels = ("intent", "transport")
        self._bytes = metrics.counter("transport_bytes", "Bytes in place on the other side", labels)
        self._done = metrics.counter("transport_transfers", "Transfers completed", labels)
        self._failed = metrics.counter("transport_failures", "Transfers failed or cancelled", labels)

    async def start(self) -> None:
        """Before anything is registered. ConfigError if the interface cannot be used."""
        for mover in self._remote:
            await mover.start()

    async def close(self) -> None:
        """TransferError as in deregister(), when all else is closed. Idempotent."""
        self._open = False
        transfers = list(self._transfers)
        for task in transfers:
            task.cancel()
        for mover in self._remote:
            await mover.close()
        if transfers:
            await asyncio.wait(transfers)
        await self._local.close()
        regions = [region.descriptor for region in self._regions.values()]
        for outcome in await asyncio.gather(*map(self.deregister, regions), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def pin(self, memory: Memory) -> None:
        for mover in self._remote:
            await mover.pin(memory)

    def register(self, memory: Memory) -> RegionDescriptor:
        """memory stays its owner's, who deregisters before closing it."""
        key = secrets.token_bytes(REGION_KEY_BYTES)
        ways: dict[str, Any] = {"shm": "", "address": "", "verbs": ""}
        if self._nic is not None:
            ways |= {"nic": self._nic.name, "rate": self._nic.rate}
        for mover in self._remote:
            ways |= mover.expose(key, memory)
        descriptor = RegionDescriptor(key, memory.size, host_identity(), **ways)
        self._regions[key] = Region(memory, descriptor)
        return descriptor

    async def deregister(self, region: RegionDescriptor) -> None:
        """Waits for our own transfers that read or write the region, and for peers that are in the middle of a write.
        TransferError if a peer does not let go of it: then the memory must not be used again. A region that is not
        registered is left as it is."""
        gone = self._regions.pop(region.key, None)
        if gone is None:
            return
        gone.registered = False
        for mover in self._remote:
            await mover.withdraw(gone)
        if gone.transfers:
            await asyncio.wait(gone.transfers)

    def give_up(self, target: RegionDescriptor) -> None:
        """The target's owner is lost: what is on its way there fails now, not at its deadline, where that can be."""
        for mover in self._remote:
            mover.give_up(target)
        for task, place in self._transfers.items():
            if place == target:  # it may wait for its turn or not have begun: no mover knows of it then
                task.cancel("the target has been given up")

    def write(self, batch: Batch, intent: Intent) -> TaskTransfer:
        """TransferError at once also if no mover reaches the target, or too many transfers are in flight."""
        self._check_room(intent)
        source = self._regions.get(batch.source.key)
        if source is None:
            raise TransferError("the source region is not registered here")
        target = self._regions.get(batch.target.key)
        check_runs(batch.runs, source.memory.size, target.memory.size if target else batch.target.size)
        mover = self._mover(batch.target)
        runs = batch.runs[batch.runs[:, 2] > 0]
        job = Job(source.memory, replace(batch, runs=runs), intent, time.monotonic() + self._transfer_s)
        users = [source.transfers, *([target.transfers] if target else [])]
        return self._begin(mover, job, self._carry(mover, job, self._strike(intent)), users)

    def takes_files(self, target: RegionDescriptor) -> bool:
        return self._mover(target).takes_files and not self._nics.paced(target)

    def write_files(self, batch: FileBatch, intent: Intent) -> TaskTransfer:
        """TransferError at once also if takes_files() is False, or too many transfers are in flight."""
        self._check_room(intent)
        target = self._regions.get(batch.target.key)
        check_places(batch, target.memory.size if target else batch.target.size)
        if not self.takes_files(batch.target):
            raise TransferError("there is no way for files to the target")
        mover = self._mover(batch.target)
        job = FileJob(batch, intent, time.monotonic() + self._transfer_s)
        carry = self._carry_files(mover, job, self._strike(intent))
        return self._begin(mover, job, carry, [target.transfers] if target else [])

    def _check_room(self, intent: Intent) -> None:
        """TransferError if it cannot begin."""
        if not self._open:
            raise TransferError("closed")
        traffic_class = CLASS_OF_INTENT[intent]
        if self._queues[traffic_class].transfers >= MAX_TRANSFERS:
            raise TransferError(f"{MAX_TRANSFERS} transfers of class {traffic_class.name} are in flight already")

    def _show_queues(self, metrics: Metrics) -> None:
        labels = ("nic", "traffic_class")
        transfers = metrics.gauge("transport_queued_transfers", "Transfers begun and not ended", labels)
        num_bytes = metrics.gauge("transport_queued_bytes", "Bytes of transfers begun and not ended", labels)
        nic = self._nic.name if self._nic is not None else ""
        for traffic_class, queue in self._queues.items():
            transfers.labels(nic, traffic_class.name).set_function(partial(getattr, queue, "transfers"))
            num_bytes.labels(nic, traffic_class.name).set_function(partial(getattr, queue, "num_bytes"))

    def _strike(self, intent: Intent) -> Fault | None:
        return self._faults.strike("transfer", type=intent.value)

    def _begin(
        self, mover: Mover, job: Job | FileJob, work: Coroutine[None, None, None], users: list[set[asyncio.Task[None]]]
    ) -> TaskTransfer:
        """users: the transfers of each region that it reads or writes."""
        intent, queue, num_bytes = job.intent, self._queues[CLASS_OF_INTENT[job.intent]], job.batch.num_bytes
        queue.transfers += 1
        queue.num_bytes += num_bytes
        transfer = TaskTransfer(work, f"{mover.name} {intent.value}")
        self._transfers[transfer.task] = job.batch.target
        for tasks in users:
            tasks.add(transfer.task)

        def ended(task: asyncio.Task[None]) -> None:
            queue.transfers -= 1
            queue.num_bytes -= num_bytes
            del self._transfers[task]
            for tasks in users:
                tasks.discard(task)
            if task.cancelled() or task.exception() is not None:
                self._failed.labels(intent.value, mover.name).inc()

        transfer.task.add_done_callback(ended)
        return transfer

    def _mover(self, target: RegionDescriptor) -> Mover:
        for mover in (self._local, *self._remote):
            if mover.reaches(target):
                return mover
        raise TransferError("no transport reaches the target: it is on another host and has no address, or is not ours")

    async def _carry(self, mover: Mover, job: Job, fault: Fault | None) -> None:
        if fault is not None:
            job = await self._suffer(fault, job)
        if not len(job.batch.runs):
            return
        for _ in range(2 if fault is not None and fault.action == "duplicate" else 1):
            await self._nics.move(mover, job)
            self._count(mover, job.intent, job.batch.num_bytes)

    async def _carry_files(self, mover: Mover, job: FileJob, fault: Fault | None) -> None:
        if fault is not None:
            job = await self._suffer(fault, job)
        for _ in range(2 if fault is not None and fault.action == "duplicate" else 1):
            await mover.move_files(job)
            self._nics.count(job.batch.target, job.intent, job.batch.num_bytes)
            self._count(mover, job.intent, job.batch.num_bytes)

    def _count(self, mover: Mover, intent: Intent, num_bytes: int) -> None:
        self._done.labels(intent.value, mover.name).inc()
        self._bytes.labels(intent.value, mover.name).inc(num_bytes)

    async def _suffer(self, fault: Fault, job: J) -> J:
        """What a fault does before the bytes move. Only tcp has a checksum that would notice corruption."""
        await asyncio.sleep(fault.seconds)
        if fault.action == "drop":
            await asyncio.sleep(job.deadline - time.monotonic())
        if fault.action in ("fail", "drop"):
            raise TransferError(f"injected fault: {fault.action}")
        return replace(job, corrupt=fault.action == "corrupt")
