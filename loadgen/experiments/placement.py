"""Where the nodes of a cluster are: on this host with NICs paced in user space, or in shaped network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from common.perf.scaling import Scaling

#: The nodes beside p0.. and d0..: scheduler and front end; storage gateway.
CONTROL, STORE = "ctl", "store"


@dataclass(frozen=True, slots=True)
class Place:
    """What makes a process one of this node: what stands before its command, and its settings, by dotted name."""

    prefix: tuple[str, ...]
    settings: dict[str, Any]


class Placement(Protocol):
    """The nodes of one cluster. description: how their NICs get their rates, for the result."""

    @property
    def description(self) -> str: ...

    def place(self, node: str) -> Place: ...


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """All nodes share this host's loopback; each paces what it sends, receives and copies to and from device memory
    itself. The store's NIC is not paced: the real one has many nodes."""

    scaling: Scaling
    description: str = "paced in user space, copies between host and device included"

    def place(self, node: str) -> Place:
        settings: dict[str, Any] = {"network.node": node}
        if node not in (CONTROL, STORE):
            settings |= {"network.snic_rate": self.scaling.snic_rate, "network.cnic_rate": self.scaling.cnic_rate}
        return Place((), settings)


class FabricPlacement:
    """Nodes of a fabric that is up (compose.fabric): the kernel shapes their NICs. Copies between host and device stay
    in a node: nothing shapes them."""

    description = "shaped by the kernel in network namespaces; copies between host and device are not"

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def place(self, node: str) -> Place:
        return Place(tuple(self._fabric.prefix(node)), self._fabric.settings(node))


@contextmanager
def placed(prefill: int, decode: int, scaling: Scaling, namespaces: bool | None) -> Iterator[Placement]:
    """The nodes of an xPyD cluster. namespaces: False paces in user space, True insists on namespaces (ConfigError
    where there are none), None takes them where they can be had."""
    if namespaces is False:
        yield LocalPlacement(scaling)
        return
    from compose.fabric import Fabric, missing

    if namespaces is None and missing():
        yield LocalPlacement(scaling)
        return
    with Fabric.up(prefill, decode, round(scaling.snic_rate), round(scaling.cnic_rate)) as fabric:
        yield FabricPlacement(fabric)
