"""What carries a batch to its target, and what it carries: the part of a transport that differs by kind.

An endpoint (common.transport.endpoint) checks, names, bounds and counts transfers; a mover only moves bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from common.tasks import settle
from common.transport.base import Batch, Intent, TransferError
from common.transport.files import FileJob
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor


@dataclass(eq=False, slots=True)
class Region:
    """A registered region. registered turns False when it is deregistered: from then on its bytes are left alone.

    transfers: our own that read or write it.
    """

    memory: Memory
    descriptor: RegionDescriptor
    registered: bool = True
    transfers: set[asyncio.Task[None]] = field(default_factory=set)


#: Registered regions by key. Finding a key here is the authorisation to write.
Regions = dict[bytes, Region]


@dataclass(frozen=True, slots=True)
class Job:
    """A checked batch on its way from registered memory; no run is empty.

    deadline: time.monotonic() seconds. corrupt: spoil one byte on the way (a fault to be detected).
    """

    source: Memory
    batch: Batch
    intent: Intent
    deadline: float
    corrupt: bool = False


class Mover:
    """One way to move bytes."""

    #: Its label in the counters.
    name: str
    #: Whether it can move parts of files.
    takes_files = False

    async def start(self) -> None:
        """Take what it needs. ConfigError if it cannot be had."""

    async def close(self) -> None:
        """End every move by force and free everything. Idempotent."""

    def reaches(self, target: RegionDescriptor) -> bool:
        """Whether it can write there."""
        raise NotImplementedError

    async def pin(self, memory: Memory) -> None:
        """Take hold of memory that is to be exposed, without holding up the event loop. ConfigError as expose()."""

    def expose(self, key: bytes, memory: Memory) -> dict[str, str]:
        """Let peers write into memory under key. What the descriptor tells them of this way: its fields and values."""
        return {}

    def give_up(self, target: RegionDescriptor) -> None:
        """The target's owner is lost: a move to it need not wait for its deadline to leave our memory alone."""

    async def withdraw(self, region: Region) -> None:
        """Returns once no peer writes into a region that is no longer registered. TransferError if one goes on."""

    async def move(self, job: Job) -> None:
        """Returns when the bytes are in place; TransferError if they are not by the deadline. However it ends, by
        cancellation too, neither memory is touched any more then."""
        raise NotImplementedError

    async def move_files(self, job: FileJob) -> None:
        """As move(), where takes_files. Every part is verified where it arrives: one that is damaged is a failure."""
        raise NotImplementedError


class Flow(Protocol):
    """A transfer on a connection. done: None once every byte is in place, else what went wrong; both memories are quiet
    then. stop() begins nothing more of it: what has begun ends within the deadline."""

    done: asyncio.Future[str | None]

    def stop(self, failure: str) -> None: ...


F = TypeVar("F", bound=Flow)


async def see_through(flow: F, deadline: float, expire: Callable[[F], None]) -> None:
    """Await its end. TransferError if it fails; a cancelled caller leaves once it is quiet. expire: called with it at
    the deadline, time.monotonic() seconds."""
    expiry = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), expire, flow)
    try:
        failure = await asyncio.shield(flow.done)
    except asyncio.CancelledError:
        flow.stop("cancelled")
        await settle(flow.done)
        raise
    finally:
        expiry.cancel()
    if failure is not None:
        raise TransferError(failure)
