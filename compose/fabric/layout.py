"""Who is on the two networks of a fabric, under which names and addresses. Pure.

Nodes: p0.. and d0.. (machines of prefill and decode engines), ctl (scheduler, front end, load generator), all with a
storage NIC and a compute NIC; store (storage gateway), which has a storage NIC only. The addresses are of the range
for benchmarks (RFC 2544), a pair of /24 networks for each fabric of this machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from common.config import parse_size
from common.errors import ConfigError

Nic = Literal["snic", "cnic"]
Direction = Literal["tx", "rx"]

NICS: tuple[Nic, ...] = ("snic", "cnic")
SECOND_OCTET: dict[Nic, int] = {"snic": 18, "cnic": 19}
CTL, STORE = "ctl", "store"
#: Name of the namespace with the switches; no process runs there.
SWITCHES = "net"
NAMESPACE_PREFIX = "dualpath-"
MAX_FABRICS = 63
MAX_ENGINES_NODES = 250
PREFIX_LENGTH = 24


@dataclass(frozen=True, slots=True)
class Layout:
    """name: of the fabric, [a-z0-9]+; slot: its place among the fabrics of this machine; rates in bytes/s each way."""

    name: str
    slot: int
    prefill: int
    decode: int
    snic_rate: int
    cnic_rate: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]{1,32}", self.name):
            raise ConfigError(f"fabric name {self.name!r}: use letters a-z and digits")
        if not 0 <= self.slot < MAX_FABRICS:
            raise ConfigError(f"there are {MAX_FABRICS} fabrics on this machine already: take one down")
        if self.prefill < 1 or self.decode < 1 or self.prefill + self.decode > MAX_ENGINES_NODES:
            raise ConfigError(
                f"{self.prefill}P{self.decode}D: a fabric has nodes of both kinds, {MAX_ENGINES_NODES} at most"
            )
        for nic, rate in (("snic", self.snic_rate), ("cnic", self.cnic_rate)):
            check_rate(nic, rate)

    @property
    def shaped(self) -> list[str]:
        """The nodes whose NICs have a rate."""
        return [f"p{index}" for index in range(self.prefill)] + [f"d{index}" for index in range(self.decode)]

    @property
    def nodes(self) -> list[str]:
        return [CTL, STORE, *self.shaped]

    def nics(self, node: str) -> tuple[Nic, ...]:
        return ("snic",) if node == STORE else NICS

    def address(self, node: str, nic: Nic) -> str:
        """ConfigError for a node or NIC that is not there."""
        if node not in self.nodes:
            raise ConfigError(f"no node {node!r} in fabric {self.name}: it has {', '.join(self.nodes)}")
        if nic not in self.nics(node):
            raise ConfigError(f"node {node} has no {nic}")
        return f"198.{SECOND_OCTET[nic]}.{self.slot}.{1 + self.nodes.index(node)}"

    def network(self, nic: Nic) -> str:
        return f"198.{SECOND_OCTET[nic]}.{self.slot}.0/{PREFIX_LENGTH}"

    def uplink(self, node: Literal["ctl", "root"]) -> str:
        """Addresses of the link between ctl and the machine itself, a /30."""
        return f"198.19.255.{4 * self.slot + (1 if node == 'root' else 2)}"

    @property
    def uplink_device(self) -> str:
        """The machine's end of that link."""
        return f"dualpath{self.slot}"

    def namespace(self, node: str) -> str:
        return f"{NAMESPACE_PREFIX}{self.name}-{node}"

    def rate(self, nic: Nic) -> int:
        return self.snic_rate if nic == "snic" else self.cnic_rate


def port(node: str, nic: Nic) -> str:
    """The switch's end of a node's cable."""
    return f"{node}-{nic}"


def transmitter(layout: Layout, node: str, nic: Nic, direction: Direction) -> tuple[str, str]:
    """(namespace, device) that sends what the node's NIC transmits or receives: the place to shape and count it."""
    if direction == "tx":
        return layout.namespace(node), nic
    return layout.namespace(SWITCHES), port(node, nic)


def parse_shape(text: str) -> tuple[int, int]:
    """'2P4D' -> (2, 4), nodes. ConfigError."""
    match = re.fullmatch(r"\s*([1-9]\d{0,3})[Pp]([1-9]\d{0,3})[Dd]\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a shape: write, say, 2P4D for two prefill and four decode nodes")
    return int(match[1]), int(match[2])


def parse_rate(text: str) -> int:
    """'26MB' or '26MB/s' -> 26,000,000 bytes/s. ConfigError."""
    try:
        value = parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise ConfigError(f"rate: {error}") from None
    assert isinstance(value, int)
    return value


def check_rate(nic: str, rate: int) -> None:
    """ConfigError for a rate (bytes/s) that packet queues on a CPU cannot hold."""
    if not 100_000 <= rate <= 10_000_000_000:
        raise ConfigError(f"{nic} rate {rate} bytes/s: must be between 100 kB/s and 10 GB/s")
