"""When a process that has left can no longer write into our memory.

A peer on this host may hold a mapping, so it counts as gone only when its process is. A peer elsewhere ends itself when
its lease does (common.enrolment), and what it has begun by then ends within the deadline of a transfer or of a storage
read.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from common.latest import Latest
from common.messages import Member

#: How often a process that has left is looked for, seconds.
POLL_S = 0.05


class Fence:
    """Tracks processes that have left. host: our common.transport.memory.host_identity(). write_s: the longest that a
    peer elsewhere goes on writing after the scheduler has given it up."""

    def __init__(self, host: str, write_s: float) -> None:
        self._host = host
        self._write_s = write_s
        self._gone: Latest[str] = Latest()
        self._awaited: dict[str, asyncio.Event] = {}

    async def left(self, member: Member) -> None:
        """The scheduler has given this member up; returns when it is gone for good."""
        if member.host == self._host:
            while member.pid != os.getpid() and _alive(member.pid):
                await asyncio.sleep(POLL_S)
        else:
            await asyncio.sleep(self._write_s)
        self._gone.add(member.incarnation)
        awaited = self._awaited.pop(member.incarnation, None)
        if awaited is not None:
            awaited.set()

    async def gone(self, incarnation: str) -> None:
        """Returns once that process has left and is fenced."""
        if incarnation not in self._gone:
            await self._awaited.setdefault(incarnation, asyncio.Event()).wait()


def _alive(pid: int) -> bool:
    """False once the process has ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
