"""Work requests, built once and posted again and again.

Building a work request in pyverbs costs some 20 microseconds, giving one that exists new addresses a quarter of one. A
provider copies what is posted to its queue within the call, so one linked list serves every queue pair of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.transport.verbs.constants import constants

#: Work requests of a list: so many writes go out with one doorbell.
LIST_WRITES = 64


class WorkList:
    """LIST_WRITES RDMA writes, linked; the last one carries the notice and the only completion.

    requests and elements: SendWRs, and the scatter-gather element that each refers to. last: the last one's send flags;
    inline: what is added to all where the bytes, at most inline_bytes a write, travel in the requests themselves.
    """

    def __init__(
        self, requests: Sequence[Any], elements: Sequence[Any], inline: int, last: int, inline_bytes: int
    ) -> None:
        self._requests = requests
        self._elements = elements
        self._inline = inline
        self._last = last
        self._inline_bytes = inline_bytes
        self._inlined = False
        self._lkey = -1

    @classmethod
    def build(cls, inline_bytes: int) -> WorkList:
        from pyverbs.wr import SGE, SendWR

        verbs = constants()
        elements = [SGE(0, 0, 0) for _ in range(LIST_WRITES)]
        requests = [
            SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[element], send_flags=0) for element in elements
        ]
        for request, element in zip(requests, elements, strict=True):
            request.sg_list = element  # its own copy would be out of reach
        for request, following in pairwise(requests):
            request.next_wr = following
        last = verbs.IBV_SEND_SIGNALED | verbs.IBV_SEND_SOLICITED
        requests[-1].opcode = verbs.IBV_WR_RDMA_WRITE_WITH_IMM
        requests[-1].send_flags = last
        return cls(requests, elements, verbs.IBV_SEND_INLINE, last, inline_bytes)

    def aim(self, writes: NDArray[np.int64], lkey: int, rkey: int, notice: int) -> Any:
        """The head of a list that does these writes, [n, 3] of source address, target address and length with n up to
        LIST_WRITES, in order. It is to be posted before the next call."""
        if lkey != self._lkey:
            self._lkey = lkey
            for element in self._elements:
                element.lkey = lkey
        first = LIST_WRITES - len(writes)  # the end of a list stays its end
        for element, request, (source, target, length) in zip(
            self._elements[first:], self._requests[first:], writes.tolist(), strict=True
        ):
            element.addr = source
            element.length = length
            request.set_wr_rdma(rkey, target)
        if (writes[:, 2].max() <= self._inline_bytes) != self._inlined:
            self._flip_inline()
        self._requests[-1].imm_data = notice
        return self._requests[first]

    def _flip_inline(self) -> None:
        self._inlined = not self._inlined
        added = self._inline if self._inlined else 0
        for request in self._requests[:-1]:
            request.send_flags = added
        self._requests[-1].send_flags = self._last | added
