"""Hops of a KV byte inside and between nodes, counted, so that the copies of a run can be checked (spec §4)."""

from __future__ import annotations

from enum import StrEnum

from common.metrics import Metrics
from common.transport.base import Batch, Intent, Transport


class Hop(StrEnum):
    """One arrow of the paper's Figure 4."""

    LOAD = "load"          # PE buffer -> PE device memory
    PUSH = "push"          # DE buffer -> PE device memory
    HANDOFF = "handoff"    # PE device memory -> DE buffer
    KEEP = "keep"          # PE device memory -> PE buffer, for the next chunk
    H2D = "h2d"            # DE buffer -> DE device memory
    D2H = "d2h"            # DE device memory -> DE buffer, to persist


class Hops:
    """Counts bytes by hop, when they have arrived. free: nothing is moved, nor counted (Oracle, spec §9)."""

    def __init__(self, metrics: Metrics, free: bool) -> None:
        self._free = free
        self._bytes = metrics.counter("kv_bytes", "KV bytes moved, by hop", ("hop",))
        for hop in Hop:
            self._bytes.labels(hop.value)

    async def write(self, transport: Transport, batch: Batch, intent: Intent, hop: Hop) -> None:
        """One transfer. TransferError if it fails; cancelled with its caller, and quiet then."""
        if self._free or not len(batch.runs):
            return
        transfer = transport.write(batch, intent)
        try:
            await transfer
        except BaseException:
            await transfer.cancel()
            raise
        self._bytes.labels(hop.value).inc(batch.num_bytes)
