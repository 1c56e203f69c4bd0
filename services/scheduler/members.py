"""Who is in the cluster: admission by version and manifest, and liveness by heartbeat. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import DualPathError, ErrorCode
from common.messages import Member
from common.types import Role
from common.wire import PROTOCOL_VERSION


@dataclass(slots=True)
class _Live:
    member: Member
    last_seen: float
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Members:
    """Members by incarnation. A process that restarts under the same name is a new incarnation and replaces the old."""

    _live: dict[str, _Live] = field(default_factory=dict)

    def admit(self, protocol: int, member: Member, now: float) -> list[Member]:
        """Add a member; returns those that it replaces. DualPathError MISMATCH names the field that differs."""
        if protocol != PROTOCOL_VERSION:
            raise DualPathError(
                ErrorCode.MISMATCH, f"{member.name} speaks protocol {protocol}, the scheduler {PROTOCOL_VERSION}"
            )
        replaced = [
            live.member
            for live in self._live.values()
            if live.member.name == member.name and live.member.incarnation != member.incarnation
        ]
        if member.manifest is not None:
            for live in self._live.values():
                if live.member.manifest is None or live.member in replaced:
                    continue
                difference = member.manifest.difference(live.member.manifest)
                if difference is not None:
                    raise DualPathError(
                        ErrorCode.MISMATCH, f"{member.name} and {live.member.name} differ in {difference}"
                    )
        self._live[member.incarnation] = _Live(member, now)
        return replaced

    def seen(self, incarnation: str, counters: dict[str, float], now: float) -> bool:
        """A heartbeat. False if we do not (or no longer) know the sender."""
        live = self._live.get(incarnation)
        if live is None:
            return False
        live.last_seen, live.counters = now, counters
        return True

    def silent(self, timeout: float, now: float) -> list[Member]:
        """Members not heard of for timeout seconds."""
        return [live.member for live in self._live.values() if now - live.last_seen > timeout]

    def remove(self, incarnation: str) -> Member | None:
        live = self._live.pop(incarnation, None)
        return live.member if live else None

    def get(self, incarnation: str) -> Member | None:
        live = self._live.get(incarnation)
        return live.member if live else None

    def all(self) -> list[Member]:
        return [live.member for live in self._live.values()]

    def of(self, role: Role) -> list[Member]:
        return [live.member for live in self._live.values() if live.member.role is role]

    def counters(self, incarnation: str) -> dict[str, float]:
        return self._live[incarnation].counters
