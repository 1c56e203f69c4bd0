"""Full garbage collections wait until little is in hand."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from common import collector


class Knot:
    """Garbage that only a full collection finds once it is old."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collector, "LOOK_S", 0.01)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def old_garbage() -> weakref.ref[Knot]:
    knot = Knot()
    for _ in range(collector.DUE + 1):
        gc.collect(1)  # it grows old meanwhile
    return weakref.ref(knot)


async def gone(garbage: weakref.ref[Knot], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            while garbage() is not None:
                await asyncio.sleep(0.005)
    except TimeoutError:
        return False
    return True


async def test_it_waits_for_a_calm_moment() -> None:
    calm = False
    task = asyncio.create_task(collector.collect_when_calm(lambda: calm))
    await asyncio.sleep(0)
    garbage = old_garbage()
    assert not await gone(garbage, 0.2)
    calm = True
    assert await gone(garbage, 5.0)
    task.cancel()


async def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LONGEST_S", 0.1)
    task = asyncio.create_task(collector.collect_when_calm(lambda: False))
    await asyncio.sleep(0)
    assert await gone(old_garbage(), 5.0)
    task.cancel()
