"""DE read path: layers that the decode side's traffic manager writes into prefill device memory (labels 3-5).

A push that is not answered in time leaves prefill memory in doubt: it may still be written. So each forward grants its
writers a window of its own, which is closed at its end if it is in doubt: the forwards around go on, and the next one
in that memory never shares it with a late write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DualPathError, ErrorCode
from common.messages import PushRows
from common.rpc import Node
from common.transport.base import Transport
from common.transport.memory import MAX_GRANTS, Memory
from common.transport.region import RegionDescriptor
from services.traffic_manager.runs import Layers
from services.traffic_manager.staging import Staged

#: Forwards with pushes at a time; a further one waits.
MAX_WINDOWS = MAX_GRANTS // 2


class PushWindow:
    """One forward's pushes. region: the right to write into device memory that its writers are given."""

    def __init__(self, node: Node, transfer_s: float, region: RegionDescriptor) -> None:
        self._node = node
        self._transfer_s = transfer_s
        self.region = region
        self.doubt = False

    async def push(self, staged: Staged, layers: Layers, rows: tuple[int, int], target: int) -> None:
        """Returns when rows [start, stop) of the layers are in device memory, where row 0 of the first of them lies at
        byte offset target. DualPathError otherwise."""
        call = PushRows(*staged.key, layers.first, layers.count, *rows, self.region, target, layers.stride)
        try:
            # the writer's own deadline is transfer_s: an answer after that is a lost one
            await self._node.link(staged.plan.peer).call(call, self._transfer_s + 1.0)
        except DualPathError as error:
            if error.code is ErrorCode.UNREACHABLE:
                self.doubt = True
            raise


class PushWindows:
    """Windows into device memory, used again and again unless they were closed."""

    def __init__(self, node: Node, transfer_s: float, transport: Transport, memory: Memory) -> None:
        self._node = node
        self._transfer_s = transfer_s
        self._transport = transport
        self._memory = memory
        self._turn = asyncio.Semaphore(MAX_WINDOWS)
        self.free: list[RegionDescriptor] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PushWindow]:
        """A window. When it ends, no push through it can write any more; TransferError if one is in the middle of it
        and does not end."""
        async with self._turn:
            region = self.free.pop() if self.free else self._transport.register(self._memory)
            window = PushWindow(self._node, self._transfer_s, region)
            yield window
            if window.doubt:
                await self._transport.deregister(region)
            else:
                self.free.append(region)
