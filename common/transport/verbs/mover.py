"""Writes between processes with RDMA devices: the way of moving bytes that transports choose for such targets.

The bytes are moved by the NICs alone, out of memory that is registered once into memory that is registered once. A
write is done when the receiver has seen the notice behind it and has said so: by then the bytes are in place and
visible there. Cancelling one posts no further list and waits for those under way. Only a transfer that is over its
deadline, or whose peer has been given up, closes the queue pair: then our NIC reads and sends nothing more, and every
other transfer on it fails as well. What the peer's NIC may still write here is its fence's business.
"""

from __future__ import annotations

import asyncio

from common.config import RdmaConfig
from common.errors import ConfigError
from common.log import get_logger
from common.metrics import Metrics
from common.tasks import to_the_end
from common.transport.base import TransferError
from common.transport.classes import CLASS_OF_INTENT, TrafficClass
from common.transport.memory import Memory, populate
from common.transport.mover import Job, Mover, Region, Regions, see_through
from common.transport.region import RegionDescriptor
from common.transport.verbs.device import Device, Registration, has_devices
from common.transport.verbs.listener import Listener
from common.transport.verbs.writer import Connection, Flow


class VerbsMover(Mover):
    """One RDMA port, a listener for peers' writes, and a queue pair for each peer and traffic class that we write to.

    nic: address or device of the interface. required: whether to fail without a usable device; otherwise it reaches
    nothing then, and log and metrics say why.
    """

    name = "verbs"

    def __init__(
        self, nic: str, config: RdmaConfig, regions: Regions, metrics: Metrics, transfer_s: float, required: bool = True
    ) -> None:
        self._nic = nic
        self._config = config
        self._regions = regions
        self._metrics = metrics
        self._transfer_s = transfer_s
        self._required = required
        self._reason: str | None = None
        self._device: Device | None = None
        self._listener: Listener | None = None
        self._memories: dict[Memory, Registration] = {}
        self._registrations: dict[bytes, Registration] = {}
        self._pinning = asyncio.Lock()
        self._connections: dict[tuple[str, TrafficClass], Connection] = {}
        self._doorbells = metrics.counter("rdma_doorbells", "Lists of work requests posted", ("traffic_class",))
        self._writes = metrics.counter("rdma_writes", "Work requests posted", ("traffic_class",))

    @property
    def usable(self) -> bool:
        return self._device is not None and self._reason is None

    async def start(self) -> None:
        try:
            self._device = Device(self._nic, self._config)
            self._listener = Listener(self._device, self._regions, self._registrations, self._metrics, self._transfer_s)
            await self._listener.start()
        except ConfigError as error:
            await self.close()
            self._do_without(error)

    async def close(self) -> None:
        connections = list(self._connections.values())
        for connection in connections:
            connection.reset("the transport was closed")
        for connection in connections:
            await connection.closed()
        if self._listener is not None:
            await self._listener.close()
        async with self._pinning:
            for registration in self._memories.values():
                registration.close()
            self._memories.clear()
            self._registrations.clear()
            if self._device is not None:
                self._device.close()
            self._device = self._listener = None

    def _do_without(self, error: ConfigError) -> None:
        """Leave everything to the next way of moving bytes, and say so; or raise, where RDMA is required."""
        if self._required:
            raise error
        self._reason = str(error)
        # a host that has devices is meant to use them
        tell = get_logger().warning if has_devices() else get_logger().info
        tell("no RDMA on this interface, tcp instead", nic=self._nic, reason=self._reason)
        labels = ("nic", "reason")
        gauge = self._metrics.gauge("rdma_fallback", "1: an interface that does without RDMA, and why", labels)
        gauge.labels(self._nic, self._reason).set(1)

    def reaches(self, target: RegionDescriptor) -> bool:
        return bool(target.verbs) and self.usable

    async def pin(self, memory: Memory) -> None:
        async with self._pinning:
            if self._device is None or not self.usable or memory in self._memories:
                return
            try:
                await to_the_end(asyncio.to_thread(self._take_hold, self._device, memory))
            except ConfigError as error:
                self._do_without(error)

    def _take_hold(self, device: Device, memory: Memory) -> None:
        """In a thread. pyverbs keeps the interpreter's lock while it registers, which is short for pages that exist."""
        if memory.dmabuf is None:
            populate(memory.view)
        registration = device.register(memory)
        if self._memories.setdefault(memory, registration) is not registration:
            registration.close()  # it was exposed meanwhile

    def expose(self, key: bytes, memory: Memory) -> dict[str, str]:
        """ConfigError if the memory cannot be registered, and RDMA is required."""
        if self._device is None or self._listener is None or not self.usable:
            return {}
        if memory not in self._memories:
            try:
                self._memories[memory] = self._device.register(memory)
            except ConfigError as error:
                self._do_without(error)
                return {}
        self._registrations[key] = self._memories[memory]
        return {"verbs": self._listener.endpoint}

    def give_up(self, target: RegionDescriptor) -> None:
        for (endpoint, _), connection in list(self._connections.items()):
            if endpoint == target.verbs:
                connection.reset(f"{endpoint.partition('/')[0]} has been given up")

    async def withdraw(self, region: Region) -> None:
        if self._listener is not None:
            await self._listener.withdraw(region.descriptor.key)
        if region.transfers:
            await asyncio.wait(region.transfers)
        self._registrations.pop(region.descriptor.key, None)
        registration = self._memories.get(region.memory)
        if registration is not None and registration not in self._registrations.values():
            self._memories.pop(region.memory).close()

    async def move(self, job: Job) -> None:
        source = self._registrations.get(job.batch.source.key)
        if source is None:
            raise TransferError("the source region was deregistered")
        flow = Flow(job, source)
        connection = self._connection(job.batch.target.verbs, CLASS_OF_INTENT[job.intent])
        connection.add(flow)
        await see_through(flow, job.deadline, connection.expire)

    def _connection(self, endpoint: str, traffic_class: TrafficClass) -> Connection:
        assert self._device is not None
        key = (endpoint, traffic_class)
        if key not in self._connections:
            doorbells = self._doorbells.labels(traffic_class.name)
            writes = self._writes.labels(traffic_class.name)

            def posted(count: int) -> None:
                doorbells.inc()
                writes.inc(count)

            self._connections[key] = Connection(
                self._device, endpoint, traffic_class, self._transfer_s, posted, ended=lambda: self._forget(key)
            )
        return self._connections[key]

    def _forget(self, key: tuple[str, TrafficClass]) -> None:
        del self._connections[key]


class Loopback(Mover):
    """Writes into regions that are registered here, through the NIC, so that it orders them with all else (paper §5).

    Without a usable device they are left to local.
    """

    name = "loopback"

    def __init__(self, verbs: VerbsMover, local: Mover, regions: Regions) -> None:
        self._verbs = verbs
        self._local = local
        self._regions = regions

    def reaches(self, target: RegionDescriptor) -> bool:
        return target.key in self._regions

    async def close(self) -> None:
        await self._local.close()

    async def move(self, job: Job) -> None:
        await (self._verbs if self._verbs.usable else self._local).move(job)
