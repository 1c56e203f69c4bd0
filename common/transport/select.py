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
from common.transport.verbs.mover import Loopback, VerbsMover


def open_transport(
    network: NetworkConfig, host: str, metrics: Metrics, faults: Faults, transfer_s: float, nic: Nic | None = None
) -> Transport:
    """The transport of one interface; host is its address (or RDMA device). Not started yet.

    auto is shm for targets on this host, else verbs where both sides have an RDMA device for it, else tcp; a side that
    has none says so in its log and metrics. Targets registered here are copied to directly, whatever the kind (but null
    moves nothing at all, and network.rdma.loopback has the NIC copy). A transfer fails transfer_s seconds after its
    write().

    nic: under which name the interface's bytes are counted, and to which rate it is paced. Without one it is not paced,
    but others' paced interfaces are still written to at their pace. The configured rates are those of engines' nodes,
    so traffic managers pass them on, and the storage gateway does not.
    """
    regions: Regions = {}
    kind = network.transport
    if kind == "null":
        free = Nic(nic.name) if nic is not None else None  # moving nothing takes no time
        return Endpoint(regions, NullMover(), [], metrics, faults, transfer_s, free)
    copier = Copier()
    local: Mover = LocalMover(copier, regions)
    remote: list[Mover] = []
    if kind in ("auto", "shm"):
        remote.append(ShmMover(copier, transfer_s))
    if kind in ("auto", "verbs"):
        verbs = VerbsMover(host, network.rdma, regions, metrics, transfer_s, required=kind == "verbs")
        remote.append(verbs)
        if network.rdma.loopback:
            local = Loopback(verbs, local, regions)
    if kind in ("auto", "tcp"):
        remote.append(TcpMover(host, regions, metrics, transfer_s, network.tcp_streams))
    return Endpoint(regions, local, remote, metrics, faults, transfer_s, nic)
