"""Requests staged in this traffic manager's buffer: slots, who may touch them, and when they are free again.

    reserving --slots--> reading --hits buffered--> ready --(forwards)--> released --quiet--> gone

A staged request is released by its engine. Its slots are free again once no local transfer uses them and, where the
other side's traffic manager may write into them (exposed), that side has said that it does not any more, or is fenced.
Until then they are quarantined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from common.blocks.pool import SlotPool
from common.errors import DualPathError, ErrorCode
from common.messages import PeerStaged, Stage
from common.transport.region import RegionDescriptor
from common.types import RequestKey
from services.traffic_manager.runs import Layers


class Sender(Protocol):
    """A forward that sends rows of a request on, layer by layer."""

    async def sent(self, key: RequestKey, layers: Layers) -> bool:
        """Once that is done of these layers: whether the request is still in it."""


@dataclass(slots=True, eq=False)
class Staged:
    """One request on this side.

    slots: its buffer slots, in block order; the first shared of them are the tier's, to be read only. cached: tokens of
    hit KV that were found here. allocation_s: from Stage to the first byte asked for; read_s: from there to the last
    hit block. sent (prefill side): of rows [0, sent) the decode buffer holds all; sender: the last forward in
    hand that sends more of them. peer_quiet: the other side does not touch our slots any more. peer_regions: where we
    write on the other side; peer_lost: it has left the cluster.
    """

    plan: Stage
    slots: list[int] = field(default_factory=list)
    shared: int = 0
    cached: int = 0
    allocation_s: float = 0.0
    read_s: float = 0.0
    buffered: bool = False
    sent: int = 0
    sender: Sender | None = None
    peer_staged: PeerStaged | None = None
    peer_regions: set[RegionDescriptor] = field(default_factory=set)
    peer_lost: bool = False
    exposed: bool = False
    released: bool = False
    users: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    peer_quiet: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.quiet.set()

    @property
    def key(self) -> RequestKey:
        return (self.plan.request_id, self.plan.attempt)

    def hits(self, block_size: int) -> tuple[int, int]:
        """Prefill side, once both sides are staged: the decode buffer holds hits in rows [start, stop). stop is the
        length of the hit prefix over both sides: theirs are hits only if none of ours before them is missing."""
        assert self.peer_staged is not None
        start = self.peer_staged.first * block_size
        if self.cached < start:
            return self.cached, self.cached
        return start, start + self.peer_staged.cached_tokens

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """Hold the slots while a transfer touches them. DualPathError: CANCELLED once the request is released,
        ENGINE_LOST once the other side has left the cluster."""
        if self.released:
            raise DualPathError(ErrorCode.CANCELLED, f"request {self.plan.request_id} was released")
        if self.peer_lost:
            raise DualPathError(ErrorCode.ENGINE_LOST, f"the other side of request {self.plan.request_id} has left")
        self.users += 1
        self.quiet.clear()
        try:
            yield
        finally:
            self.users -= 1
            if not self.users:
                self.quiet.set()


class SlotQueue:
    """Waits for slots of a pool, first come first served, so that a large request is not starved by small ones."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._waiters: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(self, count: int, timeout: float) -> list[int]:
        """count slots. DualPathError OVERLOADED at the deadline, BAD_REQUEST if the pool never holds so many."""
        if not count:
            return []
        if count > self.pool.total:
            raise DualPathError(
                ErrorCode.BAD_REQUEST, f"{count} blocks do not fit a buffer of {self.pool.total}: enlarge it"
            )
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, future))
        self._serve()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self.pool.give_back(future.result())  # granted in the very turn in which the taker gave up
            self._waiters = deque(waiter for waiter in self._waiters if waiter[1] is not future)
            self._serve()
            if not isinstance(error, TimeoutError):
                raise
            detail = f"no {count} free buffer slots within {timeout:g} s"
            raise DualPathError(ErrorCode.OVERLOADED, detail) from None

    def give_back(self, slots: list[int]) -> None:
        self.pool.give_back(slots)
        self._serve()

    def release(self, slots: list[int]) -> None:
        """Quarantined slots are free again."""
        self.pool.release(slots)
        self._serve()

    def _serve(self) -> None:
        while self._waiters:
            count, future = self._waiters[0]
            if future.done():
                self._waiters.popleft()
                continue
            slots = self.pool.take(count)
            if slots is None:
                return
            self._waiters.popleft()
            future.set_result(slots)
