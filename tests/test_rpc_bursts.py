"""Many control messages at once: handled in order, while others have their turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from common.config import Config
from common.faults import Faults
from common.messages import MemberLeft
from common.metrics import Metrics
from common.rpc import BURST_S, Node

MESSAGES = 400
WORK_S = 0.0005


def node(name: str) -> Node:
    return Node(name, Config().security, Metrics(), Faults([], name))


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["in", "back"])
async def test_a_burst_does_not_keep_the_loop(how: str) -> None:
    """Through a ROUTER, and back through a DEALER."""
    one, other = node("one"), node("other")
    endpoint = await one.bind("tcp://127.0.0.1:*")
    link = other.link(endpoint)
    seen: list[str] = []
    turns: list[int] = []  # messages handled by each turn of somebody else

    def handle(msg: MemberLeft, peer: object) -> None:
        burn(WORK_S)
        seen.append(msg.name)

    (one if how == "in" else other).on(MemberLeft, handle)
    (other if how == "in" else one).on(MemberLeft, lambda msg, peer: None)
    try:
        if how == "back":
            link.send(MemberLeft("hello", "", ""))
            await asyncio.sleep(0.1)
        for number in range(MESSAGES):
            msg = MemberLeft("", str(number), "")
            link.send(msg) if how == "in" else one.send_to(b"other", msg)
        time.sleep(0.1)  # noqa: ASYNC251 - they are all there before anybody looks

        async def others() -> None:
            while True:
                turns.append(len(seen))
                await asyncio.sleep(0)

        watching = asyncio.create_task(others())
        await until(lambda: len(seen) == MESSAGES)
        watching.cancel()
        assert seen == [str(number) for number in range(MESSAGES)]
        steps = [after - before for before, after in itertools.pairwise(turns)]
        assert max(steps) <= BURST_S / WORK_S + 2
    finally:
        await one.close()
        await other.close()
