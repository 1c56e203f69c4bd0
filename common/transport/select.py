"""Which transport serves a process: by configuration, and per target where that leaves it open."""

from __future__ import annotations

from common.config import NetworkConfig
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Transport
from common.transport.copier import Copier, LocalMover
from common.transport.endpoint import Endpoint
from common.transport.mover import Mover, Regions
from common.transport.null import NullMover
from common.transport.shm import ShmMover
from common.transport.tcp import TcpMover


def open_transport(
    network: NetworkConfig, host: str, metrics: Metrics, faults: Faults, transfer_s: float
) -> Transport:
    """The transport of one interface; host is its address. Not started yet.

    auto is shm for targets on this host and tcp for others. Targets registered here are copied to directly, whatever
    the kind (but null moves nothing at all). A transfer fails transfer_s seconds after its write().
    """
    regions: Regions = {}
    if network.transport == "null":
        return Endpoint(regions, NullMover(), [], metrics, faults, transfer_s)
    copier = Copier()
    remote: list[Mover] = []
    if network.transport in ("auto", "shm"):
        remote.append(ShmMover(copier, transfer_s))
    if network.transport in ("auto", "tcp"):
        remote.append(TcpMover(host, regions, metrics, transfer_s))
    return Endpoint(regions, LocalMover(copier, regions), remote, metrics, faults, transfer_s)
