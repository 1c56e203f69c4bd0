"""Writes between hosts without RDMA: framed one-sided writes over TCP, received straight into the registered region.

The sender writes with vectored calls out of its region, the receiver reads with vectored calls into its own; a byte is
copied by the two kernels alone, but for frames of many short runs, which are gathered and scattered. A write is done
when the receiver has verified its checksum and said so. Cancelling one sends no further frame and waits for the answers
to those under way. One that is over its deadline, or whose target is given up, resets the stream: the receiver writes
nothing more from the moment at which the reset reaches it.

Known limit: the stream is neither encrypted nor authenticated by itself. As with an RDMA rkey, the right to write is
the region's secret 128-bit key, which travels over the control plane (CURVE outside loopback) and in the frames.
Whoever can read the data network can learn keys and KV bytes: it has to be a network of the cluster's own.
"""

from __future__ import annotations

from itertools import count

from common.metrics import Metrics
from common.transport.base import TransferError
from common.transport.classes import CLASS_OF_INTENT, TrafficClass
from common.transport.files import FileJob
from common.transport.memory import Memory
from common.transport.mover import Job, Mover, Regions, see_through
from common.transport.region import RegionDescriptor
from common.transport.tcp_frames import MAX_PAYLOAD_BYTES
from common.transport.tcp_receiver import Listener
from common.transport.tcp_sender import Connection
from common.transport.tcp_sending import FileFlow, Flow, MemoryFlow


class TcpMover(Mover):
    """A listener for peers' writes, and streams for each peer address and traffic class that we write to: one, or up to
    so many while those that there are have work. A transfer is on one of them from its beginning to its end, so its
    order is kept; transfers side by side get past what one stream carries, which is a window a round trip."""

    name = "tcp"
    takes_files = True

    def __init__(self, host: str, regions: Regions, metrics: Metrics, transfer_s: float, streams: int = 1) -> None:
        self._listener = Listener(host, regions, metrics, transfer_s)
        self._transfer_s = transfer_s
        self._streams = streams
        self._connections: dict[tuple[str, TrafficClass], list[Connection]] = {}
        self._numbers = count()

    async def start(self) -> None:
        await self._listener.start()

    async def close(self) -> None:
        for connections in list(self._connections.values()):
            for connection in list(connections):
                connection.reset("the transport was closed")
        await self._listener.close()

    def reaches(self, target: RegionDescriptor) -> bool:
        return bool(target.address)

    def expose(self, key: bytes, memory: Memory) -> dict[str, str]:
        return {"address": self._listener.address}

    def give_up(self, target: RegionDescriptor) -> None:
        for (address, _), connections in list(self._connections.items()):
            if address == target.address:
                for connection in list(connections):
                    connection.reset(f"{address} has been given up")

    async def move(self, job: Job) -> None:
        await self._carry(MemoryFlow(next(self._numbers), job))

    async def move_files(self, job: FileJob) -> None:
        if any(part.length > MAX_PAYLOAD_BYTES for part in job.batch.parts):
            raise TransferError(f"a part of a file is longer than a frame of {MAX_PAYLOAD_BYTES} bytes")
        await self._carry(FileFlow(next(self._numbers), job))

    async def _carry(self, flow: Flow) -> None:
        job = flow.job
        connection = self._connection(job.batch.target.address, CLASS_OF_INTENT[job.intent])
        connection.add(flow)
        await see_through(flow, job.deadline, connection.expire)

    def _connection(self, address: str, traffic_class: TrafficClass) -> Connection:
        """The one with the least to do, or another one."""
        key = (address, traffic_class)
        connections = self._connections.setdefault(key, [])
        least = min(connections, key=lambda connection: connection.load, default=None)
        if least is not None and (not least.load or len(connections) >= self._streams):
            return least
        opened = Connection(address, traffic_class, self._transfer_s, ended=lambda: self._forget(key, opened))
        connections.append(opened)
        return opened

    def _forget(self, key: tuple[str, TrafficClass], connection: Connection) -> None:
        self._connections[key].remove(connection)
        if not self._connections[key]:
            del self._connections[key]
