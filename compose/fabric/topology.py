"""The namespaces, switches and cables of a fabric, as commands of ip, and the settings of each namespace. Pure."""

from __future__ import annotations

from compose.fabric.layout import CTL, NICS, PREFIX_LENGTH, STORE, SWITCHES, Layout, Nic, port
from compose.fabric.shaping import MTU_BYTES, segment_bytes

#: A loss costs a few milliseconds, as on networks built for storage, not the 200 ms of the Internet.
ROUTE = "rto_min 20ms quickack 1"
#: Under /proc/sys/net. reno: the one congestion control that every kernel has and that fills a queue as bulk does.
KERNEL_SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
}


def namespaces(layout: Layout) -> list[str]:
    return [layout.namespace(node) for node in (SWITCHES, *layout.nodes)]


def switches(layout: Layout) -> list[str]:
    """In the switches' namespace: a bridge for each network and a cable into each node."""
    lines = []
    for nic in NICS:
        lines += [
            f"link add {nic} mtu {MTU_BYTES} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {nic} up",
        ]
    for node in layout.nodes:
        for nic in layout.nics(node):
            end = port(node, nic)
            lines += [
                f"link add {end} mtu {MTU_BYTES} type veth "
                f"peer name {nic} mtu {MTU_BYTES} netns {layout.namespace(node)}",
                f"link set {end} master {nic} up",
            ]
    return lines


def node(layout: Layout, name: str) -> list[str]:
    """In a node's namespace, once its cables are there."""
    lines = ["link set lo up"]
    for nic in layout.nics(name):
        lines += _nic(layout, name, nic)
    if name == STORE:  # its way to the scheduler, which listens on the compute network
        gateway = layout.address(CTL, "snic")
        lines.append(f"route add {layout.address(CTL, 'cnic')} via {gateway} dev snic {ROUTE}")
    return lines


def _nic(layout: Layout, name: str, nic: Nic) -> list[str]:
    address, segment = layout.address(name, nic), segment_bytes(layout.rate(nic))
    return [
        f"link set {nic} gso_max_size {segment}",
        f"addr add {address}/{PREFIX_LENGTH} dev {nic}",
        f"link set {nic} up",
        f"route replace {layout.network(nic)} dev {nic} src {address} {ROUTE}",
    ]


def uplink(layout: Layout) -> list[str]:
    """On the machine itself: a link into ctl, over which front end and scheduler are reached. Nothing is forwarded."""
    device = layout.uplink_device
    return [
        f"link add {device} type veth peer name uplink netns {layout.namespace(CTL)}",
        f"addr add {layout.uplink('root')}/30 dev {device}",
        f"link set {device} up",
    ]


def uplink_in_ctl(layout: Layout) -> list[str]:
    return [f"addr add {layout.uplink('ctl')}/30 dev uplink", "link set uplink up"]


def uplink_routes(layout: Layout) -> list[str]:
    """On the machine itself, once both ends are up."""
    address = layout.address(CTL, "cnic")
    return [f"route add {address} via {layout.uplink('ctl')} dev {layout.uplink_device}"]
