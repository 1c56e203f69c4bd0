"""What a cluster says of itself while it runs: its members' counters, sampled at a steady pace."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass

from common.clock import monotonic
from common.config import SecurityConfig
from common.errors import ConfigError, DualPathError
from common.faults import Faults
from common.messages import GetStatus, MemberStatus, Status
from common.metrics import Metrics
from common.rpc import Node

CALL_S = 10.0
FIRST_CALLS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """at: monotonic seconds. members: as of their last heartbeat. waiting, running: requests, as the scheduler has
    them."""

    at: float
    members: list[MemberStatus]
    waiting: int
    running: int


class Observer:
    """Samples the scheduler at `control` every interval seconds, as an async context: there is a first sample once it
    is entered, or ConfigError. missed: later samples that did not come in time."""

    def __init__(self, control: str, security: SecurityConfig, interval: float) -> None:
        self.samples: list[Sample] = []
        self.missed = 0
        self._control = control
        self._interval = interval
        self._node = Node(f"observer.{secrets.token_hex(8)}", security, Metrics(), Faults([], "observer"))

    async def __aenter__(self) -> Observer:
        try:
            await self._first_sample()
        except BaseException:
            await self._node.close()
            raise
        self._task = asyncio.create_task(self._sample_regularly(), name="observer")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._sample()
        await self._node.close()

    async def _first_sample(self) -> None:
        """What all counters are compared with. A sample that is late here is none that a run misses."""
        for _ in range(FIRST_CALLS):
            await self._sample()
            if self.samples:
                self.missed = 0
                return
        raise ConfigError(
            f"the scheduler at {self._control} has not said what its members count, asked {FIRST_CALLS} times: "
            "is this machine overloaded?"
        )

    async def _sample_regularly(self) -> None:
        due = monotonic()
        while True:
            due = max(due + self._interval, monotonic())
            await asyncio.sleep(due - monotonic())
            await self._sample()

    async def _sample(self) -> None:
        try:
            status: Status = await self._node.link(self._control).call(GetStatus(), CALL_S)
        except DualPathError:
            self.missed += 1
            return
        self.samples.append(Sample(monotonic(), status.members, status.waiting, status.running))
