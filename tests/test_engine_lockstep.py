"""Rounds of a group whose leader changes, or in which somebody gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from common.messages import Member, Met
from common.metrics import Metrics
from common.types import Role
from services.engine.lockstep import Lockstep


def member(name: str) -> Member:
    return Member(Role.PREFILL, name, f"{name}.1", f"tcp://{name}", "n", 1, group="g")


class Group:
    """Engines whose messages are calls of one another's handlers. leader: of them all, to be changed."""

    def __init__(self, *names: str, wait_s: float = 60.0) -> None:
        self.members = {f"{name}.1": member(name) for name in names}
        self.leader = member(names[0])
        self.wires: dict[str, Wire] = {}
        self.engines = {name: self._engine(name, wait_s) for name in names}

    def _engine(self, name: str, wait_s: float) -> Lockstep:
        others = {key: other for key, other in self.members.items() if other.name != name}
        wire = self.wires[f"tcp://{name}"] = Wire(self)
        node: Any = wire
        return Lockstep(node, member(name), others, lambda: self.leader, lambda tokens: 0.0, wait_s, Metrics())


class Wire:
    """What Lockstep needs of its Node and of a Link."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.handlers: dict[type, Callable[..., Any]] = {}

    def on(self, kind: type, handler: Callable[..., Any]) -> None:
        self.handlers[kind] = handler

    def link(self, control: str) -> Wire:
        return self.group.wires[control]

    def send(self, msg: object) -> None:
        self.handlers[type(msg)](msg, None)

    async def call(self, msg: object, timeout: float) -> Met:
        return await self.handlers[type(msg)](msg, None)


async def test_who_gave_up_is_in_no_later_round():
    """b waits for the end of a's long round, in vain, and goes on alone; the next round is not held up by it."""
    group = Group("a", "b", wait_s=0.2)
    a, b = group.engines["a"], group.engines["b"]
    assert await a.meet(1.0, 1) == 1.0
    assert await b.meet(2.0, 1) == 2.0
    b.part(False)
    a.part(False)
    assert await a.meet(3.0, 1) == 3.0
    assert a._rounds.computing == {"a.1"} and not a._answers and not a._rounds.waiting


async def test_a_leader_that_cannot_open_a_round_goes_on_alone():
    group = Group("a", "b", wait_s=0.2)
    a, b = group.engines["a"], group.engines["b"]
    assert await b.meet(2.0, 1) == 2.0
    assert await a.meet(1.0, 1) == 1.0


async def test_a_round_ends_where_it_began():
    """The leader changes in mid-round: the old one hears of the end all the same, and whoever waits there gets on."""
    group = Group("b", "c", "a")
    b, c = group.engines["b"], group.engines["c"]
    assert await c.meet(1.0, 1) == 1.0
    waiting = asyncio.create_task(b.meet(2.0, 1))
    await asyncio.sleep(0)
    group.leader = member("a")
    c.part(False)
    async with asyncio.timeout(10):
        assert await waiting == 2.0


async def test_who_has_another_forward_is_waited_for():
    """b said so and is late: a's next round begins with it, and both take the time of the slower."""
    group = Group("a", "b")
    a, b = group.engines["a"], group.engines["b"]
    first = await asyncio.gather(a.meet(1.0, 1), b.meet(1.0, 1))
    a.part(True)
    b.part(True)
    early = asyncio.create_task(a.meet(2.0, 1))
    await asyncio.sleep(0.05)  # longer than a round waits for those of whom it knows nothing
    assert await b.meet(5.0, 1) == await early == 5.0
    assert first == [1.0, 1.0]


async def test_who_does_not_come_is_not_waited_for_long():
    group = Group("a", "b")
    a, b = group.engines["a"], group.engines["b"]
    await asyncio.gather(a.meet(1.0, 1), b.meet(1.0, 1))
    a.part(True)
    b.part(True)
    async with asyncio.timeout(10):
        assert await a.meet(2.0, 1) == 2.0
