"""The observer has a first sample, from which everything is counted, or says why there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.config import Config, SecurityConfig
from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Faults
from common.messages import GetStatus, Status
from common.metrics import Metrics
from common.rpc import Node, Peer
from loadgen.measures.observe import FIRST_CALLS, Observer


class Scheduler:
    """Refuses the first `failing` calls."""

    def __init__(self) -> None:
        self.failing = 0
        self.calls = 0
        self.node = Node("scheduler", Config().security, Metrics(), Faults([], "scheduler"))
        self.node.on(GetStatus, self._on_status)

    async def _on_status(self, msg: GetStatus, peer: Peer) -> Status:
        self.calls += 1
        if self.calls <= self.failing:
            raise DualPathError(ErrorCode.OVERLOADED, "not now")
        return Status([], waiting=self.calls, running=0)


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    await scheduler.node.close()


async def test_a_first_sample_that_is_missed_is_taken_again(scheduler: Scheduler) -> None:
    scheduler.failing = FIRST_CALLS - 1
    endpoint = await scheduler.node.bind("tcp://127.0.0.1:*")
    async with Observer(endpoint, SecurityConfig(), interval=60.0) as observer:
        assert [sample.waiting for sample in observer.samples] == [FIRST_CALLS]
        assert observer.missed == 0
    assert [sample.waiting for sample in observer.samples] == [FIRST_CALLS, FIRST_CALLS + 1], "and one at the end"


async def test_no_first_sample_is_an_error_that_names_the_scheduler(scheduler: Scheduler) -> None:
    scheduler.failing = FIRST_CALLS
    endpoint = await scheduler.node.bind("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=f"the scheduler at {endpoint} has not said"):
        async with Observer(endpoint, SecurityConfig(), interval=60.0):
            raise AssertionError("there is nothing to observe")
    assert scheduler.calls == FIRST_CALLS
