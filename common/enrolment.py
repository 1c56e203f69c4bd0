"""A process's place in the cluster: registered with the scheduler of the moment, and kept by heartbeats.

    waiting --Register--> enrolled --the scheduler has gone--> alone --the next one is there--> waiting
                              | a scheduler that lives does not answer: the process ends

The lease. A scheduler gives a member up timeouts.heartbeat_timeout_s after its last heartbeat, and peers then reuse the
memory that it writes into. So a member ends by that time after it sent the last heartbeat that was answered, also if it
could still reach its peers. A scheduler that has gone gives nobody up: where its address refuses connections nobody
listens there any more, and the lease runs from then. Alone, a process goes on with what it has. The next scheduler
knows nobody, and says so; what the last one had assigned is void then. Whoever has not come back to it within the time
of a lease has ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from common.clock import monotonic
from common.config import TimeoutsConfig, endpoint_host
from common.errors import ConfigError, DualPathError, ErrorCode
from common.log import get_logger
from common.messages import Heartbeat, Leave, Member, Register, Registered
from common.rpc import Link
from common.wire import PROTOCOL_VERSION

#: Seconds that one try to reach the scheduler takes at most.
TRY_S = 1.0


class Enrolment:
    """scheduler: the link to it. registered(answer): each time that a scheduler has taken us; replaced(): another one
    is about to. held: set while one has us; alone_since: when the last one was found to have gone, until the next one
    has us. lag(seconds): how late the loop woke up. report: what goes with a heartbeat.
    """

    def __init__(
        self,
        member: Member,
        scheduler: Callable[[], Link],
        timeouts: TimeoutsConfig,
        report: Callable[[], dict[str, float]],
        registered: Callable[[Registered], None],
        replaced: Callable[[], None],
        lag: Callable[[float], None],
    ) -> None:
        self.held = asyncio.Event()
        self.alone_since: float | None = None
        self._member = member
        self._scheduler = scheduler
        self._timeouts = timeouts
        self._report = report
        self._registered = registered
        self._replaced = replaced
        self._lag = lag
        self._answer: Registered | None = None
        self._lease = float("inf")  # until we are registered there is none
        self._log = get_logger().bind(process=member.name)

    async def begin(self) -> None:
        """Returns once a scheduler has taken us. ConfigError if it refuses, or none comes."""
        endpoint = self._scheduler().endpoint
        deadline = self._deadline()
        while True:
            sent = monotonic()
            try:
                answer: Registered = await self._scheduler().call(Register(PROTOCOL_VERSION, self._member), TRY_S)
                break
            except DualPathError as error:
                if error.code is not ErrorCode.UNREACHABLE:
                    raise ConfigError(f"the scheduler refused {self._member.name}: {error.message}") from None
            self._wait_on(endpoint, deadline)
            await self._check_lease(endpoint)
        self._answer, self._lease = answer, sent + self._timeouts.heartbeat_timeout_s
        self.alone_since = None
        self.held.set()
        self._registered(answer)

    async def keep(self) -> None:
        """Heartbeats, without end. DualPathError or ConfigError if this process cannot go on."""
        while True:
            assert self._answer is not None, "not registered"
            interval = self._answer.heartbeat_s
            try:
                gone = await self._beat(self._answer.scheduler)
            except DualPathError as error:
                if error.code is ErrorCode.ENGINE_LOST:
                    raise
                self._log.warning("heartbeat refused", error=str(error))
            else:
                if gone:
                    await self._begin_again()
            due = monotonic() + interval
            await asyncio.sleep(interval)
            self._lag(max(monotonic() - due, 0.0))

    async def _beat(self, scheduler: str) -> bool:
        """A heartbeat, repeated until one is answered; True if the scheduler that has us has gone. An answer counts
        from when it was asked for, however late it comes; what the last scheduler was asked the next one never answers.
        """
        patience = self._timeouts.heartbeat_timeout_s
        asked: dict[asyncio.Future[Any], float] = {}
        try:
            while True:
                beat = Heartbeat(self._member.incarnation, self._report(), scheduler)
                asked[asyncio.ensure_future(self._scheduler().call(beat, patience))] = monotonic()
                every = min(TRY_S, patience / 3)
                answered, _ = await asyncio.wait(asked, timeout=every, return_when=asyncio.FIRST_COMPLETED)
                for call in answered:
                    sent = asked.pop(call)
                    error = call.exception()
                    code = error.code if isinstance(error, DualPathError) else None
                    if code in (ErrorCode.UNREACHABLE, ErrorCode.OVERLOADED):
                        continue  # nobody has heard it
                    self._lease = sent + patience
                    if code is ErrorCode.STRANGER:
                        return True  # who answers at its address has taken its place
                    call.result()
                    return False
                if await self._check_lease(self._scheduler().endpoint):
                    return True
                if answered:
                    await asyncio.sleep(every)
        finally:
            for call in asked:
                call.cancel()

    async def _begin_again(self) -> None:
        """The scheduler has gone: with the next one all begins anew."""
        link = self._scheduler()
        self._log.warning("the scheduler has gone", endpoint=link.endpoint)
        self.alone_since = monotonic()
        self.held.clear()
        link.abandon_calls()
        deadline = self._deadline()
        while await _refused(link.endpoint):
            self._lease = monotonic() + self._timeouts.heartbeat_timeout_s
            self._wait_on(link.endpoint, deadline)
            await asyncio.sleep(min(TRY_S, self._timeouts.heartbeat_s))
        self._replaced()
        await self.begin()

    def _deadline(self) -> float:
        return monotonic() + self._timeouts.register_s

    def _wait_on(self, endpoint: str, deadline: float) -> None:
        """Say for whom we wait. ConfigError if that has been long enough."""
        if monotonic() > deadline:
            raise ConfigError(f"no scheduler at {endpoint}: start it first")
        self._log.info("waiting for the scheduler", endpoint=endpoint)

    async def _check_lease(self, endpoint: str) -> bool:
        """After a try that was not answered: whether the scheduler has gone. DualPathError if the lease is over."""
        if self._lease == float("inf"):
            return False
        asked = monotonic()
        if asked < self._lease and await _refused(endpoint):
            self._lease = asked + self._timeouts.heartbeat_timeout_s
            return True
        if monotonic() >= self._lease:
            raise DualPathError(ErrorCode.ENGINE_LOST, f"no lease: {endpoint} does not answer")
        return False

    async def leave(self, final: bool) -> None:
        """Tell the scheduler. Not final: returns once it assigns nothing any more, or does not answer."""
        try:
            if final:
                self._scheduler().send(Leave(self._member.incarnation, True))
            elif self.held.is_set():
                await self._scheduler().call(Leave(self._member.incarnation, False), TRY_S)
        except DualPathError as error:
            self._log.debug("the scheduler did not hear that we leave", error=str(error))


async def _refused(endpoint: str) -> bool:
    """Whether every address of the endpoint refuses a connection: whoever listened there has ended. A host that does
    not answer refuses nothing."""
    port = int(endpoint.rpartition(":")[2])
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TRY_S):
            found = await loop.getaddrinfo(endpoint_host(endpoint), port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, address)
                        return False
                    except ConnectionRefusedError:
                        continue
    except (OSError, TimeoutError):
        return False
    return bool(found)
