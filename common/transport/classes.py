"""Traffic classes: which bytes go first where a network tells them apart (paper §5).

Model collectives ride a high class and all KV traffic a low one, so that a switch or NIC with two queues isolates the
collectives. DSCP is what an Ethernet sees, the service level what InfiniBand does; the socket priority (SO_PRIORITY) is
what this host's queueing disciplines see. Nobody waits for what is being persisted, so it has the lowest priority
inside the host and streams of its own.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from common.transport.base import Intent


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """dscp: 6-bit code point; priority: Linux TC_PRIO_* value (above 6 needs privileges); service_level: 0 to 15, which
    subnet managers map to the virtual lane of that number unless told otherwise."""

    name: str
    dscp: int
    priority: int
    service_level: int


#: DSCP 46 is EF (expedited forwarding), 8 is CS1 (lower effort, RFC 3662). In the TOS byte: 0xb8 and 0x20.
COLLECTIVE = TrafficClass("collective", dscp=46, priority=6, service_level=0)
KV = TrafficClass("kv", dscp=8, priority=2, service_level=2)
BACKGROUND = TrafficClass("background", dscp=8, priority=1, service_level=2)

#: In the order of their numbers on the wire.
TRAFFIC_CLASSES = (COLLECTIVE, KV, BACKGROUND)

CLASS_OF_INTENT = {
    Intent.MODEL_COLLECTIVE: COLLECTIVE,
    Intent.KV_LOAD: KV,
    Intent.PD_HANDOFF: KV,
    Intent.KV_PERSIST: BACKGROUND,
}


def mark(sock: socket.socket, traffic_class: TrafficClass) -> None:
    """Let everything that this TCP socket sends ride in the class."""
    tos = traffic_class.dscp << 2
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    # last, because setting the TOS sets a priority as well
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, traffic_class.priority)
