"""What the policy is told. Engines are known by incarnation, requests by (request_id, attempt).

Values, though not frozen, like the actions: making a frozen one takes several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ErrorCode
from common.types import RequestKey, Role


@dataclass(slots=True)
class EngineJoined:
    """A new engine. node names the machine whose storage NIC it shares, group the engines of its role that are
    scheduled together; capacities as in common.messages.Capacity."""

    engine: str
    role: Role
    node: str
    group: str
    buffer_blocks: int
    device_tokens: int


@dataclass(slots=True)
class EngineDraining:
    """Finishes what it has been told to do, takes nothing new."""

    engine: str


@dataclass(slots=True)
class EngineLeft:
    """Dead or gone: every request on it fails."""

    engine: str


@dataclass(slots=True)
class Load:
    """One engine's report (spec §7), holding until its next one.

    seq, tok: requests assigned and unfinished, and their total tokens. read_q: hit tokens of its own requests that its
    side is still to read; read_rate: tokens a second that its side reads while it has any to read, 0: not known yet. A
    node's read queue and rate are the sums over its engines. free_device_tokens: device memory not taken (decode
    engines).
    heard: how many of the requests started on it the engine knew of; the reads of later ones come on top. None: all.
    """

    engine: str
    seq: int
    tok: int
    read_q: int
    read_rate: float
    free_device_tokens: int
    heard: int | None = None


@dataclass(slots=True)
class Fetched:
    """A group's leader asks for work, for those of its engines that have something new to report. The fetch stays open:
    what arrives later is assigned at once, until the engines are full."""

    loads: tuple[Load, ...]


@dataclass(slots=True)
class RequestArrived:
    """A matched request: num_tokens of prompt, hit_tokens of them in storage; num_blocks of staging buffer needed."""

    key: RequestKey
    num_tokens: int
    hit_tokens: int
    num_blocks: int


@dataclass(slots=True)
class PrefillEnded:
    """The prefill engine has sent everything on and holds nothing of the request any more."""

    key: RequestKey


@dataclass(slots=True)
class KvHandedOver:
    """The KV is in decode device memory; the decode staging buffer is free again."""

    key: RequestKey


@dataclass(slots=True)
class RequestEnded:
    """Finished well; the decode engine has released it."""

    key: RequestKey


@dataclass(slots=True)
class RequestErred:
    """An engine cannot go on with it."""

    key: RequestKey
    engine: str
    code: ErrorCode
    detail: str


@dataclass(slots=True)
class RequestCancelled:
    """The client went away, or a newer attempt replaces this one."""

    key: RequestKey


Event = (
    EngineJoined
    | EngineDraining
    | EngineLeft
    | Fetched
    | RequestArrived
    | PrefillEnded
    | KvHandedOver
    | RequestEnded
    | RequestErred
    | RequestCancelled
)
