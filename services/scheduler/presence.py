"""Waiting for members of the roles that a request needs, so that a restart of the only one fails nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Set

from common.log import get_logger
from common.types import Role
from services.scheduler.members import Members


class Presence:
    """leaving: incarnations of members that take no new work; a view that changes."""

    def __init__(self, members: Members, leaving: Set[str]) -> None:
        self._members = members
        self._leaving = leaving
        self._arrival = asyncio.Event()  # a member has joined: set and replaced
        self._log = get_logger()

    def joined(self) -> None:
        """A member is new."""
        self._arrival.set()
        self._arrival = asyncio.Event()

    async def wait(self, seconds: float, *roles: Role) -> None:
        """Until there is a member of each of these roles that takes work, but not for longer: whoever needs it then
        says that it is missing."""
        missing = self._missing(roles)
        if not missing:
            return
        self._log.info("waiting for a process", roles=[role.value for role in missing])
        try:
            async with asyncio.timeout(seconds):
                while self._missing(roles):
                    await self._arrival.wait()
        except TimeoutError:
            pass

    def _missing(self, roles: Iterable[Role]) -> list[Role]:
        there = {member.role for member in self._members.all() if member.incarnation not in self._leaving}
        return [role for role in roles if role not in there]
