"""A fabric: two shaped networks of namespaces on this machine, up for as long as a context lasts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq.auth

from common.config_layers import ENV_PREFIX
from common.errors import ConfigError
from compose.fabric import registry, shaping, system, topology
from compose.fabric.layout import (
    CTL,
    NAMESPACE_PREFIX,
    STORE,
    SWITCHES,
    Direction,
    Layout,
    Nic,
    check_rate,
    port,
    transmitter,
)
from compose.fabric.shaping import Counter

CONTROL_PORT, HTTP_PORT = 5700, 8000
DIRECTIONS: tuple[Direction, ...] = ("tx", "rx")


class Fabric:
    """Handle of a fabric that is up. Everything in it is a namespace of its own but one link (topology.uplink) and the
    keys' directory; down() removes all of it, with every process that still runs there.

    Methods block for some milliseconds (they run ip and tc). They raise ConfigError for what is not there.
    """

    def __init__(self, layout: Layout, owner: int | None = None) -> None:
        self.layout = layout
        self._owner = owner

    # -- life --

    @classmethod
    def up(
        cls,
        prefill: int,
        decode: int,
        snic_rate: int,
        cnic_rate: int,
        *,
        classes: bool = True,
        name: str = "",
        keep: bool = False,
    ) -> Self:
        """Make one: nodes of each kind, rates in bytes/s each way. What killed runs have left is removed first, and so
        is a kept fabric of the same name. keep: it outlives this process, until somebody takes it down.

        ConfigError if this machine cannot (root, iproute2, kernel), naming what is missing.
        """
        system.check()
        name = name or f"run{os.getpid()}"
        with registry.exclusive():
            for other in registry.names():
                holder = registry.holder(other)
                if holder is registry.Holder.DEAD or (other == name and holder is registry.Holder.NOBODY):
                    _remove(other)
            layout = Layout(name, registry.free_slot(), prefill, decode, snic_rate, cnic_rate)
            fabric = cls(layout, registry.create(layout, keep))
            try:
                fabric._make(classes)
            except BaseException:
                _remove(name)
                fabric._disown()
                raise
        return fabric

    @classmethod
    def attach(cls, name: str) -> Self:
        """One that is up already and stays its owner's."""
        layout = registry.load(name) if name in registry.names() else None
        if layout is None:
            raise ConfigError(f"no fabric {name}: there are {', '.join(registry.names()) or 'none'}")
        return cls(layout)

    def down(self) -> None:
        """Kill every process in it and remove it. Idempotent."""
        with registry.exclusive():
            _remove(self.layout.name)
        self._disown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _disown(self) -> None:
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def _make(self, classes: bool) -> None:
        layout = self.layout
        system.batch("ip", [f"netns add {namespace}" for namespace in topology.namespaces(layout)])
        for namespace in topology.namespaces(layout):
            system.set_kernel(namespace, {"ipv6/conf/all/disable_ipv6": "1"})
        system.batch("ip", topology.switches(layout), layout.namespace(SWITCHES))
        for node in layout.nodes:
            system.set_kernel(layout.namespace(node), topology.KERNEL_SETTINGS)
            system.batch("ip", topology.node(layout, node), layout.namespace(node))
        for node in layout.shaped:
            for nic in layout.nics(node):
                for direction in DIRECTIONS:
                    namespace, device = transmitter(layout, node, nic, direction)
                    system.batch("tc", shaping.shape(device, nic, direction, layout.rate(nic)), namespace)
        self.set_classes(classes)
        system.batch("ip", topology.uplink(layout))
        system.batch("ip", topology.uplink_in_ctl(layout), layout.namespace(CTL))
        system.batch("ip", topology.uplink_routes(layout))
        keys = registry.directory(layout.name) / "keys"
        keys.mkdir(mode=0o700)
        zmq.auth.create_certificates(keys, "cluster")

    # -- processes --

    @property
    def nodes(self) -> list[str]:
        return self.layout.nodes

    @property
    def url(self) -> str:
        """Of the front end in ctl, from there and from this machine itself."""
        return f"http://{self.layout.uplink('ctl')}:{HTTP_PORT}"

    def prefix(self, node: str) -> list[str]:
        """In front of a command: run it on a node, as the same process."""
        self.addresses(node)
        return system.inside(self.layout.namespace(node))

    def addresses(self, node: str) -> dict[Nic, str]:
        """By NIC."""
        return {nic: self.layout.address(node, nic) for nic in self.layout.nics(node)}

    def settings(self, node: str) -> dict[str, str | int]:
        """Configuration fields, by dotted name, of a dualpath process on a node. NICs are shaped here, so not paced."""
        own = self.addresses(node)
        control = own["snic"] if node == STORE else own["cnic"]
        return {
            "network.host": control,
            "network.snic": own["snic"],
            "network.cnic": control,
            "network.snic_rate": 0,
            "network.cnic_rate": 0,
            "network.transport": "tcp",
            "network.node": node,
            "scheduler.control": f"tcp://{self.layout.address(CTL, 'cnic')}:{CONTROL_PORT}",
            "frontend.host": self.layout.uplink("ctl"),
            "frontend.port": HTTP_PORT,
            "security.curve_dir": str(registry.directory(self.layout.name) / "keys"),
        }

    def environment(self, node: str) -> dict[str, str]:
        """settings() as environment variables."""
        return {
            f"{ENV_PREFIX}{name.replace('.', '__').upper()}": str(value) for name, value in self.settings(node).items()
        }

    def kill(self, node: str) -> None:
        """SIGKILL every process on a node."""
        self.addresses(node)
        system.kill_all(self.layout.namespace(node))

    # -- networks --

    def set_rate(self, node: str, nic: Nic, rate: int) -> None:
        """Bytes/s, both ways, from now on."""
        check_rate(nic, rate)
        for direction in DIRECTIONS:
            namespace, device = self._shaped(node, nic, direction)
            system.batch("tc", shaping.reshape(device, nic, direction, rate), namespace)

    def set_classes(self, on: bool, directions: Sequence[Direction] = DIRECTIONS) -> None:
        """Whether compute NICs tell KV from the rest, or have one queue for all: where they transmit, and where the
        switch transmits to them."""
        for node in self.layout.shaped:
            for direction in directions:
                namespace, device = transmitter(self.layout, node, "cnic", direction)
                system.batch("tc", [shaping.classify(device, on)], namespace)

    def link(self, node: str, nic: Nic, up: bool) -> None:
        """Plug a NIC's cable in, or pull it out."""
        self.layout.address(node, nic)
        state = "up" if up else "down"
        system.batch("ip", [f"link set {port(node, nic)} {state}"], self.layout.namespace(SWITCHES))

    def stats(self) -> list[Counter]:
        """Counters of every shaped NIC since the fabric is up."""
        places = {
            transmitter(self.layout, node, nic, direction): (node, nic, direction)
            for node in self.layout.shaped
            for nic in self.layout.nics(node)
            for direction in DIRECTIONS
        }
        counters = []
        for namespace in sorted({namespace for namespace, _ in places}):
            text = system.output("tc", "-netns", namespace, "-s", "-j", "qdisc", "show")
            for device, traffic_class, values in shaping.read_queues(text):
                node, nic, direction = places[(namespace, device)]
                counters.append(
                    Counter(
                        node,
                        nic,
                        direction,
                        traffic_class,
                        values["bytes"],
                        values["drops"],
                        values["backlog"],
                    )
                )
        return sorted(counters, key=lambda counter: (self.nodes.index(counter.node), counter.nic, counter.direction))

    def _shaped(self, node: str, nic: Nic, direction: Direction) -> tuple[str, str]:
        self.layout.address(node, nic)
        if node not in self.layout.shaped:
            raise ConfigError(f"node {node} has no rate: the shaped ones are {', '.join(self.layout.shaped)}")
        return transmitter(self.layout, node, nic, direction)


def _remove(name: str) -> None:
    """Whatever there is of a fabric, whole or not."""
    layout = registry.load(name)
    for namespace in system.namespaces(f"{NAMESPACE_PREFIX}{name}-"):
        system.kill_all(namespace)
        system.batch("ip", [f"netns del {namespace}"])
    if layout is not None:
        with contextlib.suppress(ConfigError):  # gone with its other end, or never made
            system.batch("ip", [f"link del {layout.uplink_device}"])
    registry.remove(name)
