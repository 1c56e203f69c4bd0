"""Data-parallel engines of a group meet at every layer: a forward takes as long for each as for the slowest (spec §8).

For profiled engines, one exchange a forward. The group's leader opens a round when somebody has a forward to compute
and the last round is over; whoever has one by then takes part, the others idle along. All who take part take the time
of the slowest attention and of the mean of everybody's tokens, since expert weights are spread over the whole group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.errors import DualPathError, ErrorCode
from common.messages import Meet, Member, Met, Part
from common.metrics import Metrics
from common.rpc import Node, Peer

#: A round waits so long, in seconds, for those whose last forward ended just now. It begins at once when all are there.
GATHER_S = 0.01
#: And so long for those who have said that they have another one.
EXPECT_S = 0.25


@dataclass(slots=True)
class Rounds:
    """The leader's view. Pure. Engines by incarnation."""

    waiting: dict[str, Meet] = field(default_factory=dict)
    computing: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)

    def meet(self, engine: str, forward: Meet) -> None:
        """It has a forward to compute, and so has ended the one before."""
        self.computing.discard(engine)
        self.expected.discard(engine)
        self.waiting[engine] = forward

    def part(self, engine: str, more: bool) -> None:
        """It is through with its forward; more: another one is planned already."""
        self.computing.discard(engine)
        if more:
            self.expected.add(engine)

    def forget(self, engine: str) -> None:
        """It has left."""
        self.computing.discard(engine)
        self.expected.discard(engine)
        self.waiting.pop(engine, None)

    def open(self) -> dict[str, Meet]:
        """Who takes part in the round that begins now; nobody, while one is going on or none is wanted."""
        if self.computing:
            return {}
        begun, self.waiting = self.waiting, {}
        self.expected.clear()
        self.computing = set(begun)
        return begun


class Lockstep:
    """One engine's part in it, and the leader's.

    leader: of the group, now. size: engines in the group. linear_s(tokens): time of all but attention, for so many
    tokens of one engine. wait_s: how long a round is waited for.
    """

    def __init__(
        self,
        node: Node,
        me: Member,
        members: Mapping[str, Member],
        leader: Callable[[], Member],
        linear_s: Callable[[float], float],
        wait_s: float,
        metrics: Metrics,
    ) -> None:
        self._node = node
        self._me = me
        self._members = members
        self._leader = leader
        self._linear_s = linear_s
        self._wait_s = wait_s
        self._rounds = Rounds()
        self._answers: dict[str, asyncio.Future[Met]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._met_at = me  # the leader of the round that we take part in
        self._slowest = metrics.counter("group_attention_max_seconds", "Attention of the slowest engine, over rounds")
        self._mean = metrics.counter("group_attention_mean_seconds", "Attention of the mean engine, over rounds")
        node.on(Meet, self._on_meet)
        node.on(Part, lambda msg, peer: self._part(msg.incarnation, msg.more))

    async def meet(self, attention_s: float, tokens: int) -> float:
        """Wait for our round; how long its forward takes. Alone, if the leader cannot be reached or no round begins."""
        forward = Meet(self._me.incarnation, attention_s, tokens)
        self._met_at = leader = self._leader()
        try:
            if leader.incarnation == self._me.incarnation:
                return (await self._met(forward)).seconds
            met: Met = await self._node.link(leader.control).call(forward, self._wait_s)
        except DualPathError:
            return attention_s + self._linear_s(tokens)
        return met.seconds

    def part(self, more: bool) -> None:
        """Our forward is computed; more: we have another one. Whoever leads by now, it is the leader of that round who
        waits for us."""
        leader = self._met_at
        if leader.incarnation == self._me.incarnation:
            self._part(self._me.incarnation, more)
            return
        try:
            self._node.link(leader.control).send(Part(self._me.incarnation, more))
        except DualPathError:
            return  # it is gone, and with it the round

    def left(self, member: Member) -> None:
        self._rounds.forget(member.incarnation)
        self._open_soon()

    # -- the leader --

    async def _on_meet(self, msg: Meet, peer: Peer) -> Met:
        return await self._met(msg)

    async def _met(self, forward: Meet) -> Met:
        answer: asyncio.Future[Met] = asyncio.get_running_loop().create_future()
        self._answers[forward.incarnation] = answer
        self._rounds.meet(forward.incarnation, forward)
        self._open_soon()
        try:
            async with asyncio.timeout(self._wait_s):
                return await answer
        except TimeoutError:
            raise DualPathError(ErrorCode.DEADLINE, f"no round within {self._wait_s:g} s") from None
        finally:
            if self._answers.get(forward.incarnation) is answer:  # given up: no round may count on it
                del self._answers[forward.incarnation]
                self._rounds.forget(forward.incarnation)

    def _part(self, engine: str, more: bool) -> None:
        self._rounds.part(engine, more)
        self._open_soon()

    def _open_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rounds = self._rounds
        if rounds.computing or not rounds.waiting:
            return
        if self._group_size() == len(rounds.waiting):
            self._open()
        else:
            patience_s = EXPECT_S if rounds.expected else GATHER_S
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._open)

    def _group_size(self) -> int:
        same = [self._me.role, self._me.group]
        return 1 + sum([other.role, other.group] == same for other in self._members.values())

    def _open(self) -> None:
        self._timer = None
        begun = self._rounds.open()
        if not begun:
            return
        size = self._group_size()
        attention = [forward.attention_s for forward in begun.values()]
        seconds = max(attention) + self._linear_s(sum(forward.tokens for forward in begun.values()) / size)
        self._slowest.inc(max(attention))
        self._mean.inc(sum(attention) / size)
        for engine in begun:
            answer = self._answers.pop(engine)
            if not answer.done():
                answer.set_result(Met(seconds))
