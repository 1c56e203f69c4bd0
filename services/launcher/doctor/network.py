"""The interfaces that the configuration names, and whether their queues tell KV from the rest."""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Config, is_loopback
from common.errors import ConfigError
from common.rpc import read_key_pair
from common.transport.classes import COLLECTIVE, KV
from common.transport.verbs.nics import is_address
from services.launcher.doctor.check import Check, Level, judged

#: Of IPv6; below it nothing works well.
LEAST_MTU = 1280
TOOL_S = 10.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host, up or not. mtu: bytes."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    up: bool
    loopback: bool = False


def read_json(*command: str) -> Any:
    """What a tool prints as JSON; None without the tool, or if it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True)
        return json.loads(done.stdout or "null")
    except (subprocess.SubprocessError, ValueError):
        return None


def read_interfaces() -> list[Interface] | None:
    """None without iproute2."""
    told = read_json("ip", "-j", "address", "show")
    return None if told is None else [parse_interface(entry) for entry in told]


def parse_interface(entry: Mapping[str, Any]) -> Interface:
    """An entry of `ip -j address show`."""
    flags = entry.get("flags", ())
    addresses = tuple(info["local"] for info in entry.get("addr_info", ()) if "local" in info)
    return Interface(entry["ifname"], addresses, entry["mtu"], "UP" in flags, "LOOPBACK" in flags)


def interface_of(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    wanted = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    for interface in interfaces:
        if any(ipaddress.ip_address(own) == wanted for own in interface.addresses):
            return interface
        if interface.loopback and wanted.is_loopback:
            return interface
    return None


def judge_interface(field: str, address: str, interfaces: Sequence[Interface]) -> Check:
    """Of an address that the configuration gives this host."""
    found = interface_of(address, interfaces)
    if found is None:
        known = ", ".join(own for interface in interfaces for own in interface.addresses)
        return Check(field, Level.FAIL, f"{address} is no address of this host", f"set {field} to one of {known}")
    return judged(
        field,
        f"{address} on {found.name}, MTU {found.mtu}",
        (not found.up, Level.FAIL, f"ip link set {found.name} up"),
        (found.mtu < LEAST_MTU, Level.WARN, f"ip link set {found.name} mtu 9000, the same on every host and switch"),
    )


# -- classes --


def kv_queue(qdiscs: Sequence[Mapping[str, Any]], filters: Sequence[Mapping[str, Any]]) -> str:
    """Where tc puts KV apart from the rest, in words; empty if nowhere. From `tc -j qdisc` and `filter show`."""
    for entry in filters:
        options = entry.get("options") or {}
        if (flow := options.get("flowid")) and _tells_kv(options.get("match") or {}):
            return f"class {flow}"
    for entry in qdiscs:
        bands = (entry.get("options") or {}).get("priomap") or ()
        if entry.get("root") and len(bands) > COLLECTIVE.priority and bands[KV.priority] != bands[COLLECTIVE.priority]:
            return f"band {bands[KV.priority]} of {entry['kind']}"
    return ""


def _tells_kv(match: Mapping[str, Any]) -> bool:
    """Whether a u32 match of the first word of an IPv4 header asks for KV's code point and no more."""
    return match.get("off") == 0 and (match.get("value"), match.get("mask")) == (
        f"{KV.dscp << 18:x}",
        f"{0xFC << 16:x}",
    )


def hardware_classes(app: Mapping[str, Any], ets: Mapping[str, Any]) -> str:
    """Where a NIC with DCB puts KV apart from collectives, in words; empty if nowhere. From `dcb -j app`, `ets`."""
    priorities = {int(dscp): int(priority) for dscp, priority in app.get("dscp_prio") or ()}
    classes = ets.get("prio_tc") or []
    kv, high = (priorities.get(known.dscp) for known in (KV, COLLECTIVE))
    if kv is None or high is None or max(kv, high) >= len(classes) or classes[kv] == classes[high]:
        return ""
    return f"traffic class {classes[kv]}, collectives in {classes[high]}"


def judge_classes(interface: Interface, queue: str, hardware: str) -> Check:
    if interface.loopback:
        return Check("traffic classes", Level.OK, "loopback: nothing to isolate")
    parts = [f"TCP's KV in {queue}" if queue else "", f"RoCE's KV in {hardware}" if hardware else ""]
    told = "; ".join(filter(None, parts))
    name = interface.name
    return judged(
        "traffic classes",
        f"{name}: {told or 'KV and collectives share a queue'}",
        (not told, Level.WARN, f"`dualpath qos linux --dev {name}` (TCP), `qos roce --dev {name}`: at switches too"),
    )


def check_classes(interface: Interface) -> Check:
    name = interface.name
    qdiscs = read_json("tc", "-j", "qdisc", "show", "dev", name) or []
    filters = read_json("tc", "-j", "filter", "show", "dev", name) or []
    app = read_json("dcb", "-j", "app", "show", "dev", name) or {}
    ets = read_json("dcb", "-j", "ets", "show", "dev", name) or {}
    return judge_classes(interface, kv_queue(qdiscs, filters), hardware_classes(app, ets))


def check_keys(config: Config) -> Check:
    if not config.security.curve_dir:
        return Check("control plane", Level.OK, "loopback only, without keys")
    try:
        read_key_pair(config.security.curve_dir)
    except ConfigError as error:
        return Check("control plane", Level.FAIL, str(error), "copy the cluster's key files to this host, readable")
    return Check("control plane", Level.OK, f"CURVE keys in {config.security.curve_dir}")


def check_network(config: Config) -> Iterator[Check]:
    yield check_keys(config)
    interfaces = read_interfaces()
    if interfaces is None:
        yield Check("interfaces", Level.WARN, "`ip` is not there to ask", "install iproute2")
        return
    network = config.network
    for field, host in (("host", network.host), ("snic", network.snic), ("cnic", network.cnic)):
        if is_address(host) or is_loopback(host):
            yield judge_interface(f"network.{field}", host, interfaces)
    if (found := compute_interface(network.cnic, interfaces)) is not None:
        yield check_classes(found)


def compute_interface(cnic: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Of an address, or of a RoCE device; an InfiniBand one has none whose queues would matter."""
    if is_address(cnic) or is_loopback(cnic):
        return interface_of(cnic, interfaces)
    device, _, port = cnic.partition(":")
    attributes = Path(f"/sys/class/infiniband/{device}/ports/{port or 1}/gid_attrs/ndevs/0")
    try:
        name = attributes.read_text().strip()
    except OSError:
        return None
    return next((interface for interface in interfaces if interface.name == name), None)
