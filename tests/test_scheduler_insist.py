"""An assignment that cannot be sent: again and again, as long as it is wanted and patience lasts."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler import insist as module
from services.scheduler.insist import insist


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)


class Peer:
    """Not reached before the so many-th try."""

    def __init__(self, reached_at: float) -> None:
        self.tries = 0
        self._reached_at = reached_at

    def send(self) -> bool:
        self.tries += 1
        return self.tries >= self._reached_at


def never() -> None:
    pytest.fail("it did not fail")


async def test_who_is_reached_is_sent_to_once() -> None:
    peer = Peer(1)
    insist(peer.send, lambda: True, never, 1.0)
    assert peer.tries == 1, "at once"
    await asyncio.sleep(0.02)
    assert peer.tries == 1


async def test_who_comes_back_is_reached() -> None:
    peer = Peer(4)
    insist(peer.send, lambda: True, never, 60.0)
    while peer.tries < 4:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert peer.tries == 4


async def test_what_is_not_wanted_any_more_is_not_sent() -> None:
    peer = Peer(float("inf"))
    asked: list[int] = []

    def wanted() -> bool:
        asked.append(peer.tries)
        return peer.tries < 3

    insist(peer.send, wanted, never, 60.0)
    while asked[-1:] != [3]:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert peer.tries == 3 and asked == [1, 2, 3]


async def test_patience_ends_with_one_failure_and_never_before_it_returns() -> None:
    peer = Peer(float("inf"))
    failures: list[int] = []
    insist(peer.send, lambda: True, lambda: failures.append(peer.tries), 0.0)
    assert failures == []
    while not failures:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(failures) == 1 and peer.tries == failures[0] >= 2
