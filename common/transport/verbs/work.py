"""Work requests, built once and posted again and again.

Building a work request in pyverbs costs some 20 microseconds, giving one that exists new addresses a quarter of one. A
provider copies what is posted to its queue within the call, so one linked list serves every queue pair of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.transport.verbs.constants import constants

#: Work requests of a list: so many writes go out with one doorbell.
LIST_WRITES = 64


class Flags(NamedTuple):
    """Send flags of verbs."""

    inline: int
    signalled: int
    solicited: int


class WorkList:
    """LIST_WRITES RDMA writes, linked; the last one carries the notice and, where it is wanted, the only completion.

    requests and elements: SendWRs, and the scatter-gather element that each refers to. inline_bytes: a list of writes
    of at most so many bytes carries them in the requests themselves.
    """

    def __init__(self, requests: Sequence[Any], elements: Sequence[Any], flags: Flags, inline_bytes: int) -> None:
        self._requests = requests
        self._elements = elements
        self._flags = flags
        self._inline_bytes = inline_bytes
        self._inline = 0
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
        requests[-1].opcode = verbs.IBV_WR_RDMA_WRITE_WITH_IMM
        flags = Flags(verbs.IBV_SEND_INLINE, verbs.IBV_SEND_SIGNALED, verbs.IBV_SEND_SOLICITED)
        return cls(requests, elements, flags, inline_bytes)

    def aim(self, writes: NDArray[np.int64], lkey: int, rkey: int, notice: int, signalled: bool) -> Any:
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
        inline = self._flags.inline if writes[:, 2].max() <= self._inline_bytes else 0
        if inline != self._inline:
            self._inline = inline
            for request in self._requests[:-1]:
                request.send_flags = inline
        last = self._requests[-1]
        last.send_flags = self._flags.solicited | inline | (self._flags.signalled if signalled else 0)
        last.imm_data = notice
        return self._requests[first]
