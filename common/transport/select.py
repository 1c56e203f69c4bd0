"""Which transport serves a process: by configuration, and per target where that leaves it open."""

from __future__ import annotations

from common.config import NetworkConfig
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Transport
from common.transport.copier import Copier, LocalMover
from common.transport.endpoint import Endpoint
from common.transport.mover import Mover, Regions
from common.transport.nic import Nic
from common.transport.null import NullMover
from common.transport.shm import ShmMover
from common.transport.tcp import TcpMover


def open_transport(
    network: NetworkConfig, host: str, metrics: Metrics, faults: Faults, transfer_s: float, nic: Nic | None = None
) -> Transport:
    """The transport of one interface; host is its address. Not started yet.

    auto is shm for targets on this host and tcp for others. Targets registered here are copied to directly, whatever
    the kind (but null moves nothing at all). A transfer fails transfer_s seconds after its write().

    nic: under which name the interface's bytes are counted, and to which rate it is paced. Without one it is not paced,
    but others' paced interfaces are still written to at their pace. The configured rates are those of engines' nodes,
    so traffic managers pass them on, and the storage gateway does not.
    """
    regions: Regions = {}
    if network.transport == "null":
        free = Nic(nic.name) if nic is not None else None  # moving nothing takes no time
        return Endpoint(regions, NullMover(), [], metrics, faults, transfer_s, free)
    copier = Copier()
    remote: list[Mover] = []
    if network.transport in ("auto", "shm"):
        remote.append(ShmMover(copier, transfer_s))
    if network.transport in ("auto", "tcp"):
        remote.append(TcpMover(host, regions, metrics, transfer_s))
    return Endpoint(regions, LocalMover(copier, regions), remote, metrics, faults, transfer_s, nic)
