"""Linux: what tc is told for a kernel's own queues, of TCP on any NIC. Pure.

Two classes, KV by its DSCP and all else. With a rate (of the NIC, or of whatever is the bottleneck behind it) htb
shapes to it and guarantees shares; without one, ets shares out what the NIC itself sends. Both let either class take
what the other leaves. The class of a socket's priority (SO_PRIORITY) would do on the sending host alone: a switch, and
the other end of a veth, see the DSCP only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config import QosConfig
from common.transport.classes import KV, TRAFFIC_CLASSES

ClassName = Literal["high", "low"]
Verb = Literal["add", "change"]

#: tc's handle of each class's queue and number of its htb class. What is not classed is high.
HANDLES: dict[ClassName, int] = {"high": 10, "low": 20}
#: A packet that is being sent holds up every other one for so long: the segments handed down by TCP are kept short.
SEGMENT_S = 100e-6
MAX_SEGMENT_BYTES = 65536
#: What may be sent at once after a pause, lest a timer that is late cost rate.
BURST_S = 0.001
#: Depth of each class's queue at full rate; what does not fit is dropped.
QUEUE_S = 0.02
MIN_QUEUE_SEGMENTS = 16
#: ets serves so many bytes of the low class in a turn: one frame of any size that is in use.
LOW_QUANTUM_BYTES = 9000
#: Priorities of sockets that a priomap tells apart.
SOCKET_PRIORITIES = range(16)


@dataclass(frozen=True, slots=True)
class Shape:
    """rate: bytes/s. segment: the largest packet that TCP may hand down; burst, queue: all in bytes."""

    rate: int
    segment: int
    burst: int
    queue: int


def shape_of(rate: int, mtu: int, burst_s: float = BURST_S) -> Shape:
    """A segment holds at least two frames, a burst two segments."""
    segment = max(2 * mtu, min(MAX_SEGMENT_BYTES, int(rate * SEGMENT_S)))
    burst = max(2 * segment, int(rate * burst_s))
    return Shape(rate, segment, burst, max(int(rate * QUEUE_S), MIN_QUEUE_SEGMENTS * segment))


def root(device: str) -> str:
    return f"qdisc add dev {device} root handle 1: htb default {HANDLES['high']}"


def one_class(verb: Verb, device: str, shape: Shape) -> list[str]:
    """All of a NIC's rate for the high class, and its queue."""
    return [_htb(verb, device, shape, "1:", HANDLES["high"], shape.rate, 0), _queue(verb, device, shape, "high")]


def two_classes(verb: Verb, device: str, shape: Shape, high_share: float) -> list[str]:
    """A guaranteed share each, the rest borrowed from one another, the high class first; and their queues."""
    return [
        _htb(verb, device, shape, "1:", 1, shape.rate, 0),
        _htb(verb, device, shape, "1:1", HANDLES["high"], shape.rate * high_share, 0),
        _htb(verb, device, shape, "1:1", HANDLES["low"], shape.rate * (1 - high_share), 1),
        _queue(verb, device, shape, "high"),
        _queue(verb, device, shape, "low"),
    ]


def _htb(verb: Verb, device: str, shape: Shape, parent: str, number: int, guaranteed: float, priority: int) -> str:
    return (
        f"class {verb} dev {device} parent {parent} classid 1:{number} htb rate {max(1, int(guaranteed))}bps "
        f"ceil {shape.rate}bps burst {shape.burst} cburst {shape.burst} prio {priority} quantum {shape.segment}"
    )


def _queue(verb: Verb, device: str, shape: Shape, name: ClassName) -> str:
    return f"qdisc {verb} dev {device} parent 1:{HANDLES[name]} handle {HANDLES[name]}: bfifo limit {shape.queue}"


def kv_match(protocol: Literal["ip", "ipv6"]) -> str:
    """The code point of KV, whose byte has two bits of others' behind it."""
    field = "ip dsfield" if protocol == "ip" else "ip6 priority"
    return f"match {field} {KV.dscp << 2:#x} 0xfc"


def linux(qos: QosConfig, device: str, rate: int | None, mtu: int) -> list[str]:
    """A shell script for one interface. rate: bytes/s; None: whatever the NIC does. mtu: bytes."""
    low = 1 - qos.high_share
    head = [
        f"# Two classes for dualpath on {device}: run as root on every host, and have the switches tell DSCP {KV.dscp}",
        f"# from the rest at their ports too, or incast queues there without classes. KV (DSCP {KV.dscp}) keeps "
        f"{low:.2%} of a",
        "# full link, everything else the rest; either takes what the other leaves.",
    ]
    return [
        *head,
        f"tc qdisc del dev {device} root 2>/dev/null || true  # whatever it had before",
        *(_ets(qos, device) if rate is None else _shaped(qos, device, shape_of(rate, mtu))),
        "# KV by its code point, which dualpath sets on its sockets",
        f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 {kv_match('ip')} flowid {_low(rate)}",
        f"tc filter add dev {device} parent 1: protocol ipv6 prio 2 u32 {kv_match('ipv6')} flowid {_low(rate)}",
        f"# What has gone through each class: tc -s qdisc show dev {device}. To undo: tc qdisc del dev {device} root",
    ]


def _low(rate: int | None) -> str:
    return "1:2" if rate is None else f"1:{HANDLES['low']}"


def _shaped(qos: QosConfig, device: str, shape: Shape) -> list[str]:
    return [
        f"# htb keeps the queue in this host: the rate, {shape.rate * 8 / 1e9:g} Gbit/s, must be what really goes "
        "through.",
        f"# Segments of {shape.segment} bytes at most: one that is being sent holds up a small message for "
        f"{shape.segment / shape.rate * 1e6:.0f} us.",
        f"ip link set dev {device} gso_max_size {shape.segment}",
        f"tc {root(device)}",
        *(f"tc {line}" for line in two_classes("add", device, shape, qos.high_share)),
    ]


def _ets(qos: QosConfig, device: str) -> list[str]:
    lows = {known.priority for known in TRAFFIC_CLASSES if known.dscp == KV.dscp}
    priomap = " ".join(str(int(priority in lows)) for priority in SOCKET_PRIORITIES)
    high = round(LOW_QUANTUM_BYTES * qos.high_share / (1 - qos.high_share))
    return [
        "# ets serves the classes in turn, so many bytes each; it does not shape: the NIC must be the bottleneck.",
        f"# Sockets' priorities {', '.join(map(str, sorted(lows)))} are KV's; the filters below are for what carries "
        "a code point only.",
        f"tc qdisc add dev {device} root handle 1: ets bands 2 quanta {high} {LOW_QUANTUM_BYTES} priomap {priomap}",
    ]
