"""How the engines of a group fetch work through their leader."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DualPathError, ErrorCode
from common.messages import EngineLoad, Fetch, Member, ReportLoad
from common.types import Role
from services.engine.fetching import Fetching, leads


def member(name: str, group: str = "g", role: Role = Role.DECODE, start: int = 1) -> Member:
    return Member(role, name, f"{name}.{start}", f"tcp://127.0.0.1:{start}", "n", 1, group=group)


def load_of(name: str, tok: int = 0) -> EngineLoad:
    return EngineLoad(f"{name}.1", 1, tok, 0, 0, 0.0, 0)


def test_the_least_name_of_the_same_role_and_group_leads():
    members = [member("d2"), member("d1"), member("a", group="other"), member("b", role=Role.PREFILL)]
    assert leads(Role.DECODE, "g", members).name == "d1"
    assert leads(Role.DECODE, "g", members[:1]).name == "d2"
    with pytest.raises(ValueError, match="empty"):
        leads(Role.PREFILL, "g", members[:2])


class Engine:
    """A Fetching with ends that a test can see. unreachable: names of members that cannot be sent to."""

    def __init__(self, name: str, *others: str) -> None:
        self.members = {f"{other}.1": member(other) for other in others}
        self.tok: int | None = 0
        self.sent: list[tuple[str, object]] = []
        self.unreachable: set[str] = set()
        self.name = name
        self.fetching = Fetching(
            member(name), self.members, self.load, self.send, lambda msg: self.sent.append(("scheduler", msg))
        )

    def load(self) -> EngineLoad | None:
        return None if self.tok is None else load_of(self.name, self.tok)

    def send(self, to: Member, msg: object) -> None:
        if to.name in self.unreachable:
            raise DualPathError(ErrorCode.UNREACHABLE, to.name)
        self.sent.append((to.name, msg))

    async def sent_soon(self) -> list[tuple[str, object]]:
        async with asyncio.timeout(10):
            while not self.sent:
                await asyncio.sleep(0.001)
        sent, self.sent = self.sent, []
        return sent


async def test_the_leader_fetches_for_all_in_one_message_with_the_latest_loads():
    engine = Engine("d0", "d1", "d2")
    engine.fetching.changed()
    engine.fetching.collect(ReportLoad(load_of("d2", 1)))
    engine.fetching.collect(ReportLoad(load_of("d1", 5)))
    engine.fetching.collect(ReportLoad(load_of("d2", 7)))
    engine.tok = 3  # read when it is sent
    ((to, fetch),) = await engine.sent_soon()
    assert (to, fetch) == ("scheduler", Fetch([load_of("d0", 3), load_of("d2", 7), load_of("d1", 5)]))
    engine.fetching.flush()
    assert engine.sent == []


async def test_others_report_to_the_leader():
    engine = Engine("d1", "d0", "d2")
    engine.fetching.changed()
    assert await engine.sent_soon() == [("d0", ReportLoad(load_of("d1")))]


async def test_the_next_one_leads_when_the_leader_has_left():
    engine = Engine("d1", "d0", "d2")
    del engine.members["d0.1"]
    engine.fetching.changed()
    engine.fetching.collect(ReportLoad(load_of("d2", 1)))
    assert await engine.sent_soon() == [("scheduler", Fetch([load_of("d1"), load_of("d2", 1)]))]


async def test_a_leader_out_of_reach_is_passed_over():
    engine = Engine("d1", "d0")
    engine.unreachable.add("d0")
    engine.fetching.changed()
    assert await engine.sent_soon() == [("scheduler", Fetch([load_of("d1")]))]


async def test_a_draining_leader_goes_on_to_speak_for_the_others():
    engine = Engine("d0", "d1")
    engine.tok = None
    engine.fetching.changed()
    engine.fetching.collect(ReportLoad(load_of("d1", 2)))
    assert await engine.sent_soon() == [("scheduler", Fetch([load_of("d1", 2)]))]


async def test_reports_that_come_to_the_wrong_engine_are_passed_on():
    engine = Engine("d1", "d0", "d2")
    engine.fetching.collect(ReportLoad(load_of("d2", 2)))
    assert await engine.sent_soon() == [("scheduler", Fetch([load_of("d2", 2)]))]


async def test_closed_it_sends_nothing():
    engine = Engine("d0")
    engine.fetching.changed()
    engine.fetching.close()
    await asyncio.sleep(0.05)
    assert engine.sent == []
