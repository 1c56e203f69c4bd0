"""DE read path: layers that the decode side's traffic manager writes into prefill device memory (labels 3-5).

A push that is not answered in time leaves prefill memory in doubt: it may still be written. settle() returns only when
every such push is answered or its writer is gone, so that the next forward never shares memory with a late write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from common.errors import DualPathError, ErrorCode
from common.messages import PushRows
from common.rpc import Node
from common.transport.region import RegionDescriptor
from services.traffic_manager.staging import Staged


class PushClient:
    """Asks decode-side traffic managers for layers. gone(incarnation) waits until that process can write no more."""

    def __init__(self, node: Node, transfer_s: float, gone: Callable[[str], Awaitable[None]]) -> None:
        self._node = node
        self._transfer_s = transfer_s
        self._gone = gone
        self._doubts: set[str] = set()

    async def push(self, staged: Staged, layer: int, rows: int, memory: RegionDescriptor, target: int) -> None:
        """Returns when rows [0, rows) of the layer lie at byte offset target of memory. DualPathError otherwise."""
        call = PushRows(*staged.key, layer, rows, memory, target)
        try:
            # the writer's own deadline is transfer_s: an answer after that is a lost one
            await self._node.link(staged.plan.peer).call(call, self._transfer_s + 1.0)
        except DualPathError as error:
            if error.code is ErrorCode.UNREACHABLE:
                self._doubts.add(staged.plan.peer_incarnation)
            raise

    async def settle(self) -> None:
        """Returns when no push is in doubt. DualPathError if a writer stays neither answering nor gone."""
        while self._doubts:
            writer = next(iter(self._doubts))
            try:
                async with asyncio.timeout(self._transfer_s):
                    await self._gone(writer)
            except TimeoutError:
                raise DualPathError(
                    ErrorCode.UNREACHABLE, f"{writer} may still write into device memory and does not answer"
                ) from None
            self._doubts.discard(writer)
