"""Whether the machine itself was the bottleneck: its CPU use, and how late the load generator's event loop ran."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from common.clock import monotonic

SAMPLE_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HostMeter:
    """Measures while it is entered. cpu: share of all cores that was busy, with whatever else ran on them but programs
    of lower priority (nice), which give way; lags: how late the event loop woke up, seconds, one every SAMPLE_S."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self.lags: list[float] = []

    async def __aenter__(self) -> HostMeter:
        self._before = _cpu_ticks()
        self._task = asyncio.create_task(self._measure(), name="host meter")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        busy, total = (after - before for after, before in zip(_cpu_ticks(), self._before, strict=True))
        self.cpu = busy / total if total else 0.0

    async def _measure(self) -> None:
        while True:
            due = monotonic() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            self.lags.append(max(monotonic() - due, 0.0))


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all cores since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    nice, idle = fields[1], fields[3] + fields[4]
    return sum(fields) - nice - idle, sum(fields)


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU time that each of these processes has used so far, by name; those that are gone are left out."""
    used = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return used
