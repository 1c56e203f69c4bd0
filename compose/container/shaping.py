"""Giving a container's NIC a rate, with the classes that every NIC of the network has (compose.fabric.shaping).

What it sends is shaped where it leaves. What it receives is first sent through an ifb device, where it can be queued:
the other end of the cable is the host's, out of the container's reach. The process itself holds no capability: tc and
ip get CAP_NET_ADMIN, if the container has it, from a copy of setpriv that the image marks with it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence

from common.errors import ConfigError
from compose.fabric import Nic
from compose.fabric.shaping import classify, segment_bytes, shape

WITH_NET_ADMIN = "with-net-admin"
MIN_RATE, MAX_RATE = 100_000, 10_000_000_000


def links(device: str, nic: Nic, rate: int) -> list[str]:
    """For ip: the device through which what comes in goes, and segments short enough for the rate (bytes/s)."""
    return [
        f"link add {receiver(nic)} type ifb",
        f"link set dev {receiver(nic)} up",
        f"link set dev {device} gso_max_size {segment_bytes(rate)}",
    ]


def queues(device: str, nic: Nic, rate: int) -> Iterator[str]:
    """For tc: shape both directions of a NIC to a rate (bytes/s)."""
    yield from shape(device, nic, "tx", rate)
    yield f"qdisc add dev {device} ingress"
    yield (
        f"filter add dev {device} parent ffff: protocol all prio 1 u32 match u32 0 0 "
        f"action mirred egress redirect dev {receiver(nic)}"
    )
    yield from shape(receiver(nic), nic, "rx", rate)
    if nic == "cnic":
        yield classify(device, True)
        yield classify(receiver(nic), True)


def receiver(nic: Nic) -> str:
    return f"{nic}-rx"


def shape_nic(device: str, nic: Nic, rate: int) -> None:
    """ConfigError where the kernel or the container does not allow it."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(f"{nic.upper()}_RATE is {rate} bytes/s: must be between 100 kB/s and 10 GB/s")
    _batch("ip", nic, links(device, nic, rate))
    _batch("tc", nic, [*queues(device, nic, rate)])


def device_of(address: str) -> str:
    """The interface with this address. ConfigError if there is none."""
    shown = subprocess.run(["ip", "-json", "-4", "address"], stdout=subprocess.PIPE, check=True, text=True).stdout
    for interface in json.loads(shown):
        if any(info.get("local") == address for info in interface["addr_info"]):
            return str(interface["ifname"])
    raise ConfigError(f"no interface has the address {address}")


def _batch(tool: str, nic: Nic, lines: Sequence[str]) -> None:
    command = [WITH_NET_ADMIN, "--inh-caps=+net_admin", "--ambient-caps=+net_admin", tool, "-batch", "-"]
    try:
        done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False)
        said = " ".join(done.stderr.split())
    except OSError as error:  # the kernel refuses a program marked with a capability that the container does not have
        said = str(error)
    else:
        if not done.returncode:
            return
    raise ConfigError(
        f"{nic.upper()}_RATE: {tool} cannot shape this container's NIC ({said}); it needs the capability NET_ADMIN and "
        f"a kernel with htb, ifb and u32; DUALPATH_NETWORK__{nic.upper()}_RATE paces it in user space instead"
    )
