"""What the transport tests share: both event loops, two endpoints that write to one another, filled memories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray

from common.config import NetworkConfig
from common.faults import Fault, Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, Transfer, Transport, make_runs
from common.transport.memory import Memory
from common.transport.nic import Nic
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from tests.rdma_support import VERBS, ends

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
MIB = 1 << 20
#: The kinds that move bytes between processes.
MOVING = ["shm", "tcp", VERBS]
each_loop = pytest.mark.parametrize("loop", LOOPS)
each_kind = pytest.mark.parametrize("kind", MOVING)


def run(loop: str, work: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
    """Run to the end on a fresh event loop. Nothing may be left behind: no task, no complaint to the loop."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        result = await asyncio.wait_for(work, seconds)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        result = runner.run(watched())
    assert complaints == [], complaints
    return result


@dataclass
class End:
    """One endpoint with its memories, closed in the right order, strictly."""

    transport: Transport
    metrics: Metrics
    memories: list[Memory] = field(default_factory=list)

    def region(self, size: int, fill: int | NDArray[np.uint8] = 0) -> tuple[RegionDescriptor, Memory]:
        memory = Memory.create("test", size)
        self.memories.append(memory)
        if isinstance(fill, int):
            memory.view[:] = bytes([fill]) * size
        else:
            memory.view[:] = fill.data
        return self.transport.register(memory), memory

    def write(self, source: RegionDescriptor, target: RegionDescriptor, *runs: tuple[int, int, int]) -> Transfer:
        table = np.array(runs, dtype=np.int64).reshape(-1, 3)
        return self.transport.write(Batch(source, target, table), Intent.KV_LOAD)

    def copy(self, source: RegionDescriptor, target: RegionDescriptor, intent: Intent = Intent.KV_LOAD) -> Transfer:
        """All of source to the front of target."""
        return self.transport.write(Batch(source, target, make_runs(0, 0, source.size)), intent)

    def counted(self, name: str, **labels: str) -> float:
        """A counter by its labels; 0 if it never counted."""
        text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return self.metrics.snapshot().get(f"{name}_total{{{text}}}", 0.0)


@asynccontextmanager
async def end(
    kind: str,
    host: str | None = None,
    transfer_s: float = 20.0,
    faults: tuple[Fault, ...] = (),
    nic: Nic | None = None,
) -> AsyncIterator[End]:
    metrics = Metrics()
    network = NetworkConfig(transport=kind)  # type: ignore[arg-type]
    address = host or ends(kind)[0]
    transport = open_transport(network, address, metrics, Faults(list(faults), "test"), transfer_s, nic)
    await transport.start()
    opened = End(transport, metrics)
    try:
        yield opened
    finally:
        await transport.close()
        for memory in opened.memories:
            memory.close()


@asynccontextmanager
async def pair(kind: str, host: str | None = None, transfer_s: float = 20.0) -> AsyncIterator[tuple[End, End]]:
    """A writer and a peer that it writes to. Regions of one are remote to the other, though they share a process."""
    own, other = (host, host) if host else ends(kind)
    async with end(kind, own, transfer_s) as writer, end(kind, other, transfer_s) as peer:
        yield writer, peer


async def done(transfer: Transfer) -> None:
    """Its end, as a coroutine."""
    await transfer


def noise(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
