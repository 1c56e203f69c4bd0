"""What a peer must know of a registered region. Apart from base.py, so that control messages need no numpy."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire import message


@message
@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """Where a region can be written: size in bytes, the secret key that grants it, and a way in per transport.

    host: identity of the owner's host and pid namespace; shm: a path on that host which maps the region; address:
    host:port of the owner's data listener; verbs: host:port/incarnation of its RDMA listener ("" where there is none).
    nic: the owner's interface, named apart from all others; rate: its pace in bytes a second where it is paced (0: it
    is not).
    """

    key: bytes
    size: int
    host: str
    shm: str
    address: str
    verbs: str = ""
    nic: str = ""
    rate: float = 0.0
