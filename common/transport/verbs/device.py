"""An open RDMA device: its protection domain, registered memory, and what this host has of such devices.

All of pyverbs that can fail at start-up is called here, and each failure becomes one line that names the fix.
"""

from __future__ import annotations

import errno
import fcntl
import resource
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.config import RdmaConfig
from common.errors import ConfigError
from common.transport.memory import Memory
from common.transport.verbs.constants import constants
from common.transport.verbs.nics import MTUS, Gid, Place, Port, choose
from common.transport.verbs.work import WorkList

if TYPE_CHECKING:
    from pyverbs.device import Context

#: Bytes of a write that travel in its work request, so that the NIC need not read memory for such short ones: the first
#: of these that the device takes.
INLINE_BYTES = (220, 96, 60, 0)
#: Entries of a GID table that are looked at.
MAX_GIDS = 256
_KINDS = {0: "IB", 1: "RoCE v1", 2: "RoCE v2"}
_SIOCGIFADDR = 0x8915


class Registration:
    """Memory that a NIC may read and write, pinned until close(). address: of its first byte, as the NIC sees it."""

    def __init__(self, region: Any, address: int) -> None:
        self.address = address
        self.lkey: int = region.lkey
        self.rkey: int = region.rkey
        self._region = region

    def close(self) -> None:
        """The NIC refuses every access from now on."""
        self._region.close()


class Device:
    """One port of one device, opened. work: the work requests that its queue pairs take turns to post."""

    def __init__(self, nic: str, config: RdmaConfig) -> None:
        """ConfigError if it cannot be had, or cannot be used."""
        self.place: Place = choose(nic, find_ports(), config.gid_index, config.mtu)
        self.spin = config.spin
        self._scratch: Any = None
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError

        self.context = _open(self.place.port.device)
        self.domain: Any = None
        try:
            self.domain = PD(self.context)
            self.lkey, self.scratch = self._register_scratch()
            self.inline_bytes = self._probe_inline()
        except PyverbsError as error:
            self.close()
            raise ConfigError(
                f"cannot use {self.place.port}: {error}: choose another device in snic and cnic"
            ) from None
        except BaseException:
            self.close()
            raise
        self.work = WorkList.build(self.inline_bytes)

    def _register_scratch(self) -> tuple[int, int]:
        """Memory for receives, which have no bytes but must name some; and a first try whether memory can be pinned."""
        from pyverbs.mr import MR
        from pyverbs.pyverbs_error import PyverbsRDMAError

        try:
            self._scratch = MR(self.domain, 4096, constants().IBV_ACCESS_LOCAL_WRITE)
        except PyverbsRDMAError as error:
            raise _refused_registration(4096, error) from None
        return self._scratch.lkey, self._scratch.buf

    def _probe_inline(self) -> int:
        from pyverbs.cq import CQ
        from pyverbs.pyverbs_error import PyverbsRDMAError
        from pyverbs.qp import QP, QPCap, QPInitAttr

        queue = CQ(self.context, 2)
        try:
            for limit in INLINE_BYTES:
                capabilities = QPCap(max_send_wr=1, max_recv_wr=1, max_inline_data=limit)
                kind = constants().IBV_QPT_RC
                with suppress(PyverbsRDMAError):
                    QP(self.domain, QPInitAttr(qp_type=kind, scq=queue, rcq=queue, cap=capabilities)).close()
                    return limit
        finally:
            queue.close()
        raise ConfigError(f"{self.place.port} has no reliable connections: choose another device in snic and cnic")

    def register(self, memory: Memory) -> Registration:
        """ConfigError if the host does not let this process pin so much memory."""
        from pyverbs.mr import MR, DmaBufMR
        from pyverbs.pyverbs_error import PyverbsRDMAError

        access = constants().IBV_ACCESS_LOCAL_WRITE | constants().IBV_ACCESS_REMOTE_WRITE
        try:
            if memory.dmabuf is not None:
                return Registration(DmaBufMR(self.domain, memory.size, access, memory.dmabuf, 0), 0)
            address = np.frombuffer(memory.view, np.uint8).ctypes.data
            return Registration(MR(self.domain, memory.size, access, address), address)
        except PyverbsRDMAError as error:
            raise _refused_registration(memory.size, error) from None

    def close(self) -> None:
        """After its queue pairs and registrations. Idempotent."""
        if self._scratch is not None:
            self._scratch.close()
        if self.domain is not None:
            self.domain.close()
        self.context.close()


def has_devices() -> bool:
    """Whether this host has any RDMA device, usable or not."""
    return any(Path("/sys/class/infiniband").glob("*"))


def find_ports() -> list[Port]:
    """Every port of every RDMA device of this host. ConfigError without pyverbs."""
    try:
        from pyverbs.device import get_device_list
    except ImportError as error:
        raise ConfigError(
            f"RDMA needs pyverbs ({error}): install the extra `rdma` and rdma-core (Debian: libibverbs1 "
            "ibverbs-providers librdmacm1), or set network.transport to tcp"
        ) from None
    from pyverbs.pyverbs_error import PyverbsError

    ports: list[Port] = []
    try:
        names = [device.name.decode() for device in get_device_list()]
    except PyverbsError:  # no RDMA in this kernel at all
        return []
    for name in sorted(names):
        context = _open(name)
        try:
            for number in range(1, context.query_device().phys_port_cnt + 1):
                ports.append(_describe(context, name, number))
        finally:
            context.close()
    return ports


def _describe(context: Context, name: str, number: int) -> Port:
    port = context.query_port(number)
    gids = tuple(
        Gid(entry.gid_index, entry.gid_str(), _KINDS.get(entry.gid_type, "unknown"))
        for entry in context.query_gid_table(MAX_GIDS)
        if entry.port_num == number
    )
    ethernet = port.link_layer == constants().IBV_LINK_LAYER_ETHERNET
    return Port(
        device=name,
        number=number,
        active=port.state == constants().IBV_PORT_ACTIVE,
        ethernet=ethernet,
        mtu=MTUS[port.active_mtu],
        lid=port.lid,
        gids=gids,
        addresses=tuple(dict.fromkeys(gid.address for gid in gids)) if ethernet else _ipoib_addresses(name),
    )


def _ipoib_addresses(device: str) -> tuple[str, ...]:
    """IPv4 addresses of the network interfaces on an InfiniBand device."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for interface in sorted(Path(f"/sys/class/infiniband/{device}/device/net").glob("*")):
            with suppress(OSError):
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(found)


def _open(name: str) -> Context:
    from pyverbs.device import Context
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return Context(name=name)
    except PyverbsError as error:
        raise ConfigError(
            f"cannot open the RDMA device {name}: {error}: this process needs to read and write /dev/infiniband/uverbs*"
        ) from None


def _refused_registration(num_bytes: int, error: Exception) -> ConfigError:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if getattr(error, "error_code", None) == errno.ENOMEM and limit != resource.RLIM_INFINITY:
        return ConfigError(
            f"cannot lock {num_bytes} bytes of memory for RDMA, the limit is {limit}: raise it "
            "(ulimit -l unlimited; LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)"
        )
    return ConfigError(f"cannot register {num_bytes} bytes of memory for RDMA: {error}")
