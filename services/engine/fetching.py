"""Fetching work for a group (spec §7): its leader alone talks to the scheduler, for all of the group's engines.

An engine reports to its leader whenever its load has changed. The leader fetches soon after: changes that come close
together, its own and others', go in one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from common.errors import DualPathError
from common.messages import EngineLoad, Fetch, Member, ReportLoad
from common.types import Role

#: How long a changed load waits for others, seconds: longer than a burst of messages takes, far shorter than a forward.
GATHER_S = 0.005


def leads(role: Role, group: str, members: Iterable[Member]) -> Member:
    """The leader of a group: the live member with the least name. ValueError if it has no live members."""
    return min(
        (member for member in members if member.role is role and member.group == group),
        key=lambda member: (member.name, member.incarnation),
    )


class Fetching:
    """One engine's part in it.

    me: this engine, as it registers. members: the other live processes, by incarnation; a view that changes. load: what
    to report now, or None while this engine takes nothing new (it still leads until it has left). send: to a member,
    DualPathError if that cannot be; to_scheduler: likewise, but never raises.
    """

    def __init__(
        self,
        me: Member,
        members: Mapping[str, Member],
        load: Callable[[], EngineLoad | None],
        send: Callable[[Member, object], None],
        to_scheduler: Callable[[object], None],
    ) -> None:
        self._me = me
        self._members = members
        self._load = load
        self._send = send
        self._to_scheduler = to_scheduler
        self._reports: dict[str, EngineLoad] = {}  # by others, not yet passed on
        self._changed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def leader(self) -> Member:
        return leads(self._me.role, self._me.group, [self._me, *self._members.values()])

    def changed(self) -> None:
        """Our load is not what we last reported, or it is time to report again."""
        self._changed = True
        self._soon()

    def collect(self, msg: ReportLoad) -> None:
        """Another engine's report. One that takes us for its leader by mistake is served all the same."""
        self._reports[msg.load.incarnation] = msg.load
        self._soon()

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Pass on now what there is."""
        self.close()
        loads = list(self._reports.values())
        self._reports.clear()
        own = self._load() if self._changed else None
        self._changed = False
        if own is not None and not self._reported_to_leader(own):
            loads.insert(0, own)
        if loads:
            self._to_scheduler(Fetch(loads))

    def _reported_to_leader(self, load: EngineLoad) -> bool:
        """False if we lead, or the leader cannot be reached."""
        leader = self.leader
        if leader.incarnation == self._me.incarnation:
            return False
        try:
            self._send(leader, ReportLoad(load))
        except DualPathError:
            return False
        return True

    def close(self) -> None:
        """Nothing is sent any more, until something changes again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
