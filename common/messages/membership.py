"""Membership: any process <-> scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from common.model import Manifest
from common.types import Role
from common.wire import message


@message
@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold. Tokens of context, blocks of staging buffer, tokens of device memory."""

    max_context_tokens: int
    buffer_blocks: int
    device_tokens: int


@message
@dataclass(frozen=True, slots=True)
class Member:
    """One live process. incarnation is new at every start; control is its ROUTER endpoint.

    node: the machine whose NICs it shares, as configured; host: common.transport.memory.host_identity(). group (engines
    only): those of one role that are scheduled together; the live member with the least name leads it (spec §7).

    traffic_manager (engines only): the control endpoint of the engine's traffic manager. health: URL of its pages for
    operators (common.health).
    """

    role: Role
    name: str
    incarnation: str
    control: str
    node: str
    pid: int
    host: str = ""
    manifest: Manifest | None = None
    capacity: Capacity | None = None
    traffic_manager: str = ""
    traffic_manager_incarnation: str = ""
    group: str = ""
    health: str = ""


@message
@dataclass(frozen=True, slots=True)
class Register:
    """process -> scheduler, call. Answered by Registered, or an error that names what differs."""

    protocol: int
    member: Member


@message
@dataclass(frozen=True, slots=True)
class Registered:
    """scheduler: its incarnation."""

    heartbeat_s: float
    members: list[Member]
    scheduler: str = ""


@message
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """process -> scheduler, call, every heartbeat_s, with all its counters and gauges. Answered by Done, or STRANGER by
    another scheduler than the one that the process is registered with."""

    incarnation: str
    counters: dict[str, float]
    scheduler: str = ""


@message
@dataclass(frozen=True, slots=True)
class Leave:
    """process -> scheduler: is gone (final); or takes no new work from now on, as it drains: a call, answered by Done
    behind the last assignment."""

    incarnation: str
    final: bool


@message
@dataclass(frozen=True, slots=True)
class MemberJoined:
    """scheduler -> every process."""

    member: Member


@message
@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """scheduler -> every process: it finishes what it has; new work goes to others, if there are any."""

    incarnation: str


@message
@dataclass(frozen=True, slots=True)
class MemberLeft:
    """scheduler -> every process: whatever this incarnation held or was still writing is void."""

    incarnation: str
    name: str
    reason: str


@message
@dataclass(frozen=True, slots=True)
class GetStatus:
    """operator -> scheduler, call. Answered by Status."""


@message
@dataclass(frozen=True, slots=True)
class MemberStatus:
    """leaving: it finishes what it has."""

    member: Member
    counters: dict[str, float]
    leaving: bool = False


@message
@dataclass(frozen=True, slots=True)
class Status:
    """members: the scheduler is one of them."""

    members: list[MemberStatus]
    waiting: int
    running: int
