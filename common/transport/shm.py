"""Writes between processes of one host: the writer maps the target region and copies into it.

The owner cannot check addresses here, so the writer does, against the descriptor and against the real size of the
mapped memory. Mappings are kept per memory, whatever regions are registered in it, until one of these turns out to be
withdrawn or the owner's process ends (a pidfd tells): memory of a dead process is freed at once.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

from common.transport.base import TransferError
from common.transport.copier import Copier, Stop, copy, is_small
from common.transport.files import FileJob, read_parts
from common.transport.memory import Memory, host_identity, owner_pid
from common.transport.mover import Job, Mover, Region
from common.transport.region import RegionDescriptor

Write = Callable[[Memory, Stop], None]

#: How often the owner of a region looks whether the last peer has left it, seconds.
QUIET_POLL_S = 0.001


class ShmMover(Mover):
    """Mappings are opened, used and closed on the copier's thread, or here while that is idle, so they need no lock."""

    name = "shm"
    takes_files = True

    def __init__(self, copier: Copier, transfer_s: float) -> None:
        self._copier = copier
        self._transfer_s = transfer_s
        self._grants: dict[bytes, int] = {}
        self._mappings: dict[tuple[int, str], Memory] = {}  # by owner's pid and path
        self._owners: dict[int, int] = {}  # pid -> pidfd

    def reaches(self, target: RegionDescriptor) -> bool:
        return bool(target.shm) and target.host == host_identity()

    async def close(self) -> None:
        for pid in list(self._owners):
            self._unwatch(pid)

    def expose(self, key: bytes, memory: Memory) -> dict[str, str]:
        self._grants[key] = memory.grant(key)
        return {"shm": memory.path}

    async def withdraw(self, region: Region) -> None:
        grant = self._grants.pop(region.descriptor.key)
        deadline = time.monotonic() + self._transfer_s
        while not region.memory.revoke(grant):
            if time.monotonic() > deadline:
                raise TransferError("a peer that was writing into the region does not end")
            await asyncio.sleep(QUIET_POLL_S)

    async def move(self, job: Job) -> None:
        small = is_small(job) and self._copier.idle
        await self._move(job.batch.target, small, lambda memory, stop: copy(job, memory, stop))

    async def move_files(self, job: FileJob) -> None:
        def read(memory: Memory, stop: Stop) -> None:
            read_parts(job, memory, stop.before(job.deadline))

        await self._move(job.batch.target, False, read)

    async def _move(self, target: RegionDescriptor, small: bool, write: Write) -> None:
        """small: here and now, not on the thread."""
        try:
            owner = owner_pid(target.shm)
            self._watch(owner)
        except (OSError, ValueError) as error:
            raise TransferError(f"the owner of the target region cannot be found: {error}") from None
        if small:
            self._write(owner, target, write, Stop())
        else:
            await self._copier.run(lambda stop: self._write(owner, target, write, stop))
        if owner not in self._owners or _has_ended(self._owners[owner]):
            raise TransferError(f"process {owner}, which owns the target region, has ended")

    def _write(self, owner: int, target: RegionDescriptor, write: Write, stop: Stop) -> None:
        known = (owner, target.shm) in self._mappings
        # what was mapped there before may not be what is there now
        if not self._write_mapped(owner, target, write, stop) and not (
            known and self._write_mapped(owner, target, write, stop)
        ):
            raise TransferError("refused: the target region is not registered any more")

    def _write_mapped(self, owner: int, target: RegionDescriptor, write: Write, stop: Stop) -> bool:
        """False if the region is not registered in that memory, which is unmapped then."""
        place = (owner, target.shm)
        try:
            memory = self._mappings.get(place) or Memory.open(target.shm, target.size)
        except (OSError, ValueError) as error:
            raise TransferError(f"the target region cannot be mapped: {error}") from None
        self._mappings[place] = memory
        with memory.writing(target.key) as granted:
            if granted:
                write(memory, stop)
        if not granted:
            self._mappings.pop(place).close()
        return granted

    def _watch(self, pid: int) -> None:
        if pid not in self._owners:
            pidfd = os.pidfd_open(pid)
            self._owners[pid] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._unwatch, pid)

    def _unwatch(self, pid: int) -> None:
        """That process has ended, or we do."""
        pidfd = self._owners.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._copier.submit(lambda: self._unmap(pid))

    def _unmap(self, pid: int) -> None:
        for place in [place for place in self._mappings if place[0] == pid]:
            self._mappings.pop(place).close()


def _has_ended(pidfd: int) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))
