"""A NIC's rate and its traffic classes, as commands of tc, and its counters. Pure.

Every NIC is shaped at both ends of its cable: what it transmits in the node, what it receives at the switch. The
compute NIC has two classes by DSCP (spec §5): KV marks itself as common.transport.classes says and is guaranteed
0.1 %, everything else 99.9 %; either takes what the other leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.transport.classes import KV
from compose.fabric.layout import Direction, Nic

TrafficClass = Literal["high", "low"]

#: Of the storage and the compute network: large frames cost less CPU.
MTU_BYTES = 9000
HIGH_SHARE = 0.999
#: tc's handle of each class's queue and number of its htb class. What is not classed is high.
HANDLES: dict[TrafficClass, int] = {"high": 10, "low": 20}
#: A packet that is being sent holds up every other one for so long: the segments handed down by TCP are kept short.
SEGMENT_S = 100e-6
MAX_SEGMENT_BYTES = 65536
#: What a NIC may send at once after a pause, lest a timer that is late cost it rate. More for reception: there the
#: sender's shape should show, not a second one.
BURST_S: dict[Direction, float] = {"tx": 0.001, "rx": 0.004}
#: Depth of each class's queue at full rate; what does not fit is dropped.
QUEUE_S = 0.02
MIN_QUEUE_SEGMENTS = 16


def segment_bytes(rate: int) -> int:
    """The largest packet that TCP may hand to a NIC of this rate (bytes/s): at least two frames."""
    return max(2 * MTU_BYTES, min(MAX_SEGMENT_BYTES, int(rate * SEGMENT_S)))


def _classes(verb: str, device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    segment = segment_bytes(rate)
    burst = max(2 * segment, int(rate * BURST_S[direction]))

    def htb(parent: str, number: int, guaranteed: float, priority: int) -> str:
        return (
            f"class {verb} dev {device} parent {parent} classid 1:{number} htb rate {max(1, int(guaranteed))}bps "
            f"ceil {rate}bps burst {burst} cburst {burst} prio {priority} quantum {segment}"
        )

    if nic == "snic":
        return [htb("1:", HANDLES["high"], rate, 0)]
    return [
        htb("1:", 1, rate, 0),
        htb("1:1", HANDLES["high"], rate * HIGH_SHARE, 0),
        htb("1:1", HANDLES["low"], rate * (1 - HIGH_SHARE), 1),
    ]


def _queues(verb: str, device: str, nic: Nic, rate: int) -> list[str]:
    limit = max(int(rate * QUEUE_S), MIN_QUEUE_SEGMENTS * segment_bytes(rate))
    handles = [HANDLES["high"]] if nic == "snic" else list(HANDLES.values())
    return [f"qdisc {verb} dev {device} parent 1:{handle} handle {handle}: bfifo limit {limit}" for handle in handles]


def shape(device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    """Give a device its rate (bytes/s), for the first time."""
    root = f"qdisc add dev {device} root handle 1: htb default {HANDLES['high']}"
    return [root, *_classes("add", device, nic, direction, rate), *_queues("add", device, nic, rate)]


def reshape(device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    """Give it another one; what is queued stays queued."""
    return [*_classes("change", device, nic, direction, rate), *_queues("change", device, nic, rate)]


def classify(device: str, on: bool) -> str:
    """Put marked packets into the low class, or together with all others."""
    return (
        f"filter replace dev {device} parent 1: protocol ip prio 1 handle 800::1 u32 "
        f"match ip dsfield {KV.dscp << 2:#x} 0xfc flowid 1:{HANDLES['low' if on else 'high']}"
    )


@dataclass(frozen=True, slots=True)
class Counter:
    """What has passed one NIC in one direction and class. bytes: on the wire, headers included."""

    node: str
    nic: Nic
    direction: Direction
    traffic_class: TrafficClass
    bytes: int
    dropped_packets: int
    queued_bytes: int


def read_queues(text: str) -> Iterator[tuple[str, TrafficClass, dict[str, int]]]:
    """(device, class, counters) of every class's queue in the JSON output of `tc -s qdisc show`."""
    classes = {f"{handle}:": name for name, handle in HANDLES.items()}
    for entry in json.loads(text):
        if entry["kind"] == "bfifo" and entry.get("handle") in classes:
            yield entry["dev"], classes[entry["handle"]], entry
