"""The event loop's watchdog: what counts is CPU time, of whichever way a callback came to the loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from common.metrics import Metrics
from common.watchdog import BOUNDS_S, NAME, CallbackTimes, WatchedLoop


def burn(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def slow(loop: WatchedLoop) -> int:
    """Callbacks over 20 ms so far."""
    return sum(loop.times.counts[BOUNDS_S.index(0.02) + 1 :])


async def burn_in_a_task() -> None:
    burn(0.03)


async def burn_in_a_timer(loop: asyncio.AbstractEventLoop) -> None:
    done = loop.create_future()
    loop.call_later(0.001, lambda: (burn(0.03), done.set_result(None)))
    await done


async def burn_in_a_reader(loop: asyncio.AbstractEventLoop) -> None:
    read, write = os.pipe()
    done = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(read)
        burn(0.03)
        done.set_result(None)

    loop.add_reader(read, on_readable)
    os.write(write, b"x")
    await done
    os.close(read)
    os.close(write)


async def burn_for_a_thread(loop: asyncio.AbstractEventLoop) -> None:
    done = asyncio.Event()
    threading.Thread(target=loop.call_soon_threadsafe, args=(lambda: (burn(0.03), done.set()),)).start()
    await done.wait()


@pytest.mark.parametrize("way", ["task", "timer", "reader", "thread"])
def test_a_callback_that_computes_too_long_is_seen(way: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        work = {
            "task": burn_in_a_task,
            "timer": lambda: burn_in_a_timer(loop),
            "reader": lambda: burn_in_a_reader(loop),
            "thread": lambda: burn_for_a_thread(loop),
        }[way]
        before = slow(loop)
        await asyncio.create_task(work())
        await asyncio.sleep(0)
        assert slow(loop) == before + 1

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(scenario())


def test_waiting_and_other_threads_do_not_count() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop, but computes nothing
        await asyncio.to_thread(burn, 0.05)
        await asyncio.sleep(0)
        assert slow(loop) == 0

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(scenario())


def test_a_failing_callback_is_still_reported_to_the_loop() -> None:
    seen = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(scenario())
    assert [type(error) for error in seen] == [ZeroDivisionError]


def test_the_histogram_is_a_metric() -> None:
    metrics, times = Metrics(), CallbackTimes()
    metrics.registry.register(times)
    for seconds in (0.0005, 0.001, 0.0015, 0.019, 0.021, 7.0):
        times.add(seconds, test_the_histogram_is_a_metric)
    lines = dict(line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if line.startswith("dual"))
    counts = [float(lines[f'dualpath_{NAME}_bucket{{le="{bound}"}}']) for bound in (*BOUNDS_S, "+Inf")]
    assert counts == [2, 3, 3, 3, 4, 5, 5, 6]
    assert float(lines[f"dualpath_{NAME}_count"]) == 6
    assert float(lines[f"dualpath_{NAME}_sum"]) == pytest.approx(7.043)
