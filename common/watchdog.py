"""How long callbacks keep an event loop for themselves, in CPU time of its thread: what a busy machine takes does not
count.

A WatchedLoop times what is scheduled through it: steps of tasks, timers, readers and writers. What uvloop's own
transports call directly (bytes of an HTTP connection) is not seen, what that starts is.

To ask for CPU time costs a system call, as much as a short callback itself. So it is asked for where a callback took
over BOUNDS_S[0] on the clock, and is counted from the last time that it was asked for, at most that long before: a
figure is up to BOUNDS_S[0] too high.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from time import monotonic, thread_time
from typing import Any

import uvloop
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.log import get_logger

#: Upper bounds of the histogram, seconds. No callback should take longer than LIMIT_S.
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
LIMIT_S = 0.02
NAME = "event_loop_callback_cpu_seconds"
SLOW = "callback kept the event loop"


class CallbackTimes(Collector):
    """A histogram of CPU time by callback, in the registry that it is registered with."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, callback: object) -> None:
        """One callback has run."""
        self.total_s += seconds
        if seconds <= BOUNDS_S[0]:
            self.counts[0] += 1
            return
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        if seconds > LIMIT_S:
            get_logger().warning(SLOW, cpu_s=round(seconds, 4), callback=_describe(callback))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets, below = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family = HistogramMetricFamily(f"dualpath_{NAME}", "CPU time of the event loop's thread by callback")
        family.add_metric([], buckets, self.total_s)
        yield family


def _describe(callback: object) -> str:
    """Whose it is: of a step of a task, the task."""
    owner = getattr(callback, "__self__", None)
    get_coro = getattr(owner, "get_coro", None)
    if get_coro is not None:
        return str(getattr(get_coro(), "__qualname__", owner))
    return str(getattr(callback, "__qualname__", callback))


class WatchedLoop(uvloop.Loop):
    """The event loop of every service. times: what its callbacks took."""

    def __init__(self) -> None:
        super().__init__()
        self.times = CallbackTimes()
        self._asked_at = 0.0  # when the thread's CPU time was asked for last
        self._cpu = 0.0  # what it was

    def _run_timed(self, callback: Callable[..., object], *args: Any) -> None:
        begun = monotonic()
        if begun - self._asked_at > BOUNDS_S[0]:
            self._asked_at, self._cpu = begun, thread_time()
        try:
            callback(*args)
        finally:
            took = monotonic() - begun
            if took > BOUNDS_S[0]:
                before, self._cpu = self._cpu, thread_time()
                self._asked_at = begun + took
                took = min(took, self._cpu - before)
            self.times.add(took, callback)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(self._run_timed, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon_threadsafe(self._run_timed, callback, *args, context=context)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_later(delay, self._run_timed, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, self._run_timed, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:  # type: ignore[override]
        return super().add_reader(fd, self._run_timed, callback, *args)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:  # type: ignore[override]
        return super().add_writer(fd, self._run_timed, callback, *args)
