"""RDMA devices, and which transport the configuration comes to on this host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.config import Config
from common.errors import ConfigError
from common.transport.verbs.device import find_ports, has_devices
from common.transport.verbs.nics import Place, Port, choose
from services.launcher.doctor.check import Check, Level

_FIX = "load its driver (`rdma link` lists devices) and install the extra `rdma`, or set network.transport to tcp"


def show_port(port: Port) -> str:
    kind = "RoCE" if port.ethernet else "InfiniBand"
    gids = "; ".join(map(str, port.gids)) or "none"
    return f"{kind}, {'active' if port.active else 'down'}, MTU {port.mtu}, GIDs {gids}"


def judge_rdma(config: Config, ports: Sequence[Port], broken: str) -> Iterator[Check]:
    """A check a device, and one for each interface that needs one. broken: why devices cannot be asked; empty if they
    can."""
    network = config.network
    wanted, maybe = network.transport == "verbs", network.transport == "auto"
    needed = wanted or (maybe and bool(ports or broken))
    bad = Level.FAIL if wanted else Level.WARN
    for port in ports:
        yield Check(f"RDMA {port.device}:{port.number}", Level.OK, show_port(port))
    if broken:
        yield Check("RDMA", bad if needed else Level.OK, broken, _FIX if needed else "")
    elif not ports:
        yield Check("RDMA", bad if needed else Level.OK, "no device", _FIX if needed else "")
    if not needed or broken:
        return
    for field, nic in (("snic", network.snic), ("cnic", network.cnic)):
        try:
            place = choose(nic, ports, network.rdma.gid_index, network.rdma.mtu)
        except ConfigError as error:
            yield Check(f"network.{field} over RDMA", bad, str(error), "" if wanted else "until then this one uses tcp")
        else:
            yield Check(f"network.{field} over RDMA", Level.OK, _show_place(place))


def _show_place(place: Place) -> str:
    words = f"{place.port}, GID {place.gid}, path MTU {place.mtu}"
    return words if place.port.ethernet else f"{words}; service levels: `dualpath qos ib`, `smpquery sl2vl`"


def transport_check(config: Config, checks: Sequence[Check]) -> Check:
    """What network.transport comes to, given the checks of RDMA."""
    kind = config.network.transport
    if kind != "auto":
        return Check("transport", Level.OK, f"{kind}, as configured")
    over = [check for check in checks if check.name.endswith("over RDMA")]
    if over and all(check.level is Level.OK for check in over):
        return Check("transport", Level.OK, "auto: shm within the host, verbs between hosts")
    if any(check.level is Level.OK for check in over):
        between = "verbs on one interface and tcp on the other between hosts"
    else:
        between = "tcp between hosts, for want of a usable RDMA device"
    return Check("transport", Level.OK, f"auto: shm within the host, {between}")


def check_rdma(config: Config) -> Iterator[Check]:
    ports: Sequence[Port] = []
    broken = ""
    if has_devices() or config.network.transport == "verbs":
        try:
            ports = find_ports()
        except ConfigError as error:
            broken = str(error)
    checks = list(judge_rdma(config, ports, broken))
    yield from checks
    yield transport_check(config, checks)
