"""Which RDMA device, port and GID serve an interface of the configuration. Pure; device.py finds out what there is.

An interface is an address or a device (NAME, or NAME:PORT). A RoCE port has a GID for each address of its interface,
and one for each version of RoCE: the one that is RoCE v2 and the address itself is the right one, whatever its index.
An InfiniBand port has no such GIDs; it is found by the address of its IPoIB interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from common.errors import ConfigError

ROCE_V2 = "RoCE v2"
#: Bytes of a path MTU, by its number in verbs.
MTUS = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. kind: "RoCE v2", "RoCE v1" or "IB"."""

    index: int
    gid: str
    kind: str

    @property
    def address(self) -> str:
        """The IP address that a RoCE GID stands for."""
        parsed = IPv6Address(self.gid)
        return str(parsed.ipv4_mapped or parsed)

    def __str__(self) -> str:
        return f"{self.index} ({self.address}, {self.kind})"


@dataclass(frozen=True, slots=True)
class Port:
    """A port as it is. mtu: active path MTU, bytes; addresses: of its network interfaces."""

    device: str
    number: int
    active: bool
    ethernet: bool
    mtu: int
    lid: int
    gids: tuple[Gid, ...]
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.device}:{self.number} ({', '.join(self.addresses) or 'no address'})"


@dataclass(frozen=True, slots=True)
class Place:
    """What was chosen. address: where peers reach this host over the interface; mtu: path MTU of its queue pairs."""

    port: Port
    gid: Gid
    address: str
    mtu: int


def choose(nic: str, ports: Sequence[Port], gid_index: int | None = None, mtu: int = 0) -> Place:
    """The place of an interface. gid_index overrides the choice of GID, mtu (bytes) the port's active path MTU.
    ConfigError names what to change."""
    if not ports:
        raise ConfigError(
            "there is no RDMA device on this host: load its driver (`rdma link` lists them; for software RoCE: "
            "`rdma link add rxe0 type rxe netdev IF`), or set network.transport to tcp"
        )
    port = _port(nic, ports)
    if not port.active:
        raise ConfigError(f"the port of {nic} is down: bring {port} up, its network interface included")
    gid = _gid(nic, port, gid_index)
    if mtu > port.mtu:
        raise ConfigError(
            f"network.rdma.mtu {mtu} is more than {port} takes, {port.mtu}: lower it, or raise its interface's MTU"
        )
    address = nic if nic in port.addresses else _first_address(port, gid)
    return Place(port, gid, address, mtu or port.mtu)


def _port(nic: str, ports: Sequence[Port]) -> Port:
    if is_address(nic):
        wanted = str(ip_address(nic))
        found = [port for port in ports if wanted in port.addresses]
        if not found:
            raise ConfigError(f"no RDMA device has the address {nic}: set snic and cnic of network to {_list(ports)}")
        return found[0]
    name, _, number = nic.partition(":")
    found = [port for port in ports if port.device == name and number in ("", str(port.number))]
    if not found:
        raise ConfigError(f"there is no RDMA device {nic}: set snic and cnic of network to {_list(ports)}")
    return next((port for port in found if port.active), found[0])


def _gid(nic: str, port: Port, index: int | None) -> Gid:
    table = {gid.index: gid for gid in port.gids}
    if index is not None:
        if index not in table:
            raise ConfigError(
                f"network.rdma.gid_index {index} does not exist on {port}, which has {_list(port.gids)}: "
                "set one of these, or none to have it found by its address"
            )
        return table[index]
    if not port.ethernet:
        return port.gids[0]
    usable = [gid for gid in port.gids if gid.kind == ROCE_V2]
    if is_address(nic):
        usable = [gid for gid in usable if gid.address == str(ip_address(nic))]
    else:  # a routable one rather than a link-local one
        usable.sort(key=lambda gid: ip_address(gid.address).is_link_local)
    if not usable:
        raise ConfigError(
            f"{port} has no RoCE v2 GID for {nic}, only {_list(port.gids)}: give its interface that address, "
            "or set network.rdma.gid_index"
        )
    return usable[0]


def _first_address(port: Port, gid: Gid) -> str:
    if port.ethernet:
        return gid.address
    if not port.addresses:
        raise ConfigError(f"{port}: give its IPoIB interface one, over which peers set connections up")
    return port.addresses[0]


def is_address(nic: str) -> bool:
    try:
        ip_address(nic)
    except ValueError:
        return False
    return True


def _list(things: Iterable[object]) -> str:
    return " or ".join(str(thing) for thing in things) or "none"
