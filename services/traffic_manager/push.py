"""DE read path: layers that the decode side's traffic manager writes into prefill device memory (labels 3-5).

A push that is not answered in time leaves prefill memory in doubt: it may still be written. settle() then withdraws the
right to write there, so that the next forward never shares memory with a late write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.errors import DualPathError, ErrorCode
from common.messages import PushRows
from common.rpc import Node
from common.transport.region import RegionDescriptor
from services.traffic_manager.runs import Layers
from services.traffic_manager.staging import Staged


class PushClient:
    """Asks decode-side traffic managers for layers. revoke() returns when nobody can write under the descriptors that
    they were given."""

    def __init__(self, node: Node, transfer_s: float, revoke: Callable[[], Awaitable[None]]) -> None:
        self._node = node
        self._transfer_s = transfer_s
        self._revoke = revoke
        self._doubt = False

    async def push(
        self, staged: Staged, layers: Layers, rows: tuple[int, int], memory: RegionDescriptor, target: int
    ) -> None:
        """Returns when rows [start, stop) of the layers are in memory, where row 0 of the first of them lies at byte
        offset target. DualPathError otherwise."""
        call = PushRows(*staged.key, layers.first, layers.count, *rows, memory, target, layers.stride)
        try:
            # the writer's own deadline is transfer_s: an answer after that is a lost one
            await self._node.link(staged.plan.peer).call(call, self._transfer_s + 1.0)
        except DualPathError as error:
            if error.code is ErrorCode.UNREACHABLE:
                self._doubt = True
            raise

    async def settle(self) -> None:
        """Returns when no push can write any more. TransferError if one is in the middle of it and does not end."""
        if self._doubt:
            await self._revoke()
            self._doubt = False
