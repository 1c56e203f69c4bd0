"""A NIC's rate and its traffic classes, as commands of tc, and its counters. Pure.

Every NIC is shaped at both ends of its cable: what it transmits in the node, what it receives at the switch. The
compute NIC has two classes by DSCP (paper §5), as `dualpath qos linux` has them: KV marks itself and is guaranteed
0.1 %, everything else 99.9 %; either takes what the other leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from common.config import QosConfig
from common.qos import linux
from common.qos.linux import HANDLES, ClassName, Verb
from compose.fabric.layout import Direction, Nic

#: Of the storage and the compute network: large frames cost less CPU.
MTU_BYTES = 9000
HIGH_SHARE = QosConfig().high_share
#: Of reception: there the sender's shape should show, not a second one.
RX_BURST_S = 0.004


def segment_bytes(rate: int) -> int:
    """The largest packet that TCP may hand to a NIC of this rate (bytes/s)."""
    return linux.shape_of(rate, MTU_BYTES).segment


def _classes(verb: Verb, device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    shape = linux.shape_of(rate, MTU_BYTES, linux.BURST_S if direction == "tx" else RX_BURST_S)
    if nic == "snic":
        return linux.one_class(verb, device, shape)
    return linux.two_classes(verb, device, shape, HIGH_SHARE)


def shape(device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    """Give a device its rate (bytes/s), for the first time."""
    return [linux.root(device), *_classes("add", device, nic, direction, rate)]


def reshape(device: str, nic: Nic, direction: Direction, rate: int) -> list[str]:
    """Give it another one; what is queued stays queued."""
    return _classes("change", device, nic, direction, rate)


def classify(device: str, on: bool) -> str:
    """Put marked packets into the low class, or together with all others."""
    flow = HANDLES["low" if on else "high"]
    match = linux.kv_match("ip")
    return f"filter replace dev {device} parent 1: protocol ip prio 1 handle 800::1 u32 {match} flowid 1:{flow}"


@dataclass(frozen=True, slots=True)
class Counter:
    """What has passed one NIC in one direction and class. bytes: on the wire, headers included."""

    node: str
    nic: Nic
    direction: Direction
    traffic_class: ClassName
    bytes: int
    dropped_packets: int
    queued_bytes: int


def read_queues(text: str) -> Iterator[tuple[str, ClassName, dict[str, int]]]:
    """(device, class, counters) of every class's queue in the JSON output of `tc -s qdisc show`."""
    classes = {f"{handle}:": name for name, handle in HANDLES.items()}
    for entry in json.loads(text):
        if entry["kind"] == "bfifo" and entry.get("handle") in classes:
            yield entry["dev"], classes[entry["handle"]], entry
