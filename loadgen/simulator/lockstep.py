"""Data-parallel prefill engines of a group meet at every layer: a forward takes as long for each as for the slowest.

The rules are those of services.engine.lockstep: a round begins when somebody has a forward to compute and the last
round is over. Whoever has one by then takes part; all who do take the time of the slowest attention and of the mean of
everybody's tokens, since expert weights are spread over the whole group.
"""

from __future__ import annotations

from typing import Protocol

from common.types import Role
from loadgen.simulator.forward import Forward
from loadgen.simulator.machines import Group
from loadgen.simulator.world import World


class Member(Protocol):
    """An engine of the group. slow: by which its computing is stretched."""

    slow: float

    def begin(self, forward: Forward, seconds: float) -> None:
        """Its round begins, and takes so long if nothing holds it up."""


class PrefillGroup(Group):
    """slowest_s, mean_s: attention of the slowest and of the mean engine, summed over rounds. Without experts
    nothing is spread: every engine computes on its own."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, Role.PREFILL)
        self.slowest_s = 0.0
        self.mean_s = 0.0
        self._spread = world.constants.spread
        self._gather_s = world.constants.gather_s
        self._linear_s = world.constants.compute.prefill_linear_s
        self._waiting: dict[Member, Forward] = {}
        self._computing: set[Member] = set()
        self._timer = 0  # the last one set; others are void

    def meet(self, engine: Member, forward: Forward) -> None:
        """It has a forward to compute; engine.begin() is called once its round begins."""
        if not self._spread:
            attention_s = forward.attention_s * engine.slow
            self.slowest_s += attention_s
            self.mean_s += attention_s
            engine.begin(forward, attention_s + engine.slow * self._linear_s(forward.tokens))
            return
        self._waiting[engine] = forward
        self._open_soon()

    def part(self, engine: Member) -> None:
        """It is through with its forward."""
        self._computing.discard(engine)
        self._open_soon()

    def forget(self, engine: Member) -> None:
        """It has left."""
        self._computing.discard(engine)
        self._waiting.pop(engine, None)
        self._open_soon()

    def _open_soon(self) -> None:
        """At once if all are there, else after a moment in which others may come."""
        self._timer += 1
        if self._computing or not self._waiting:
            return
        if len(self._waiting) == len(self.engines):
            self._open(self._timer)
        else:
            self._clock.at(self._clock.now + self._gather_s, self._open, self._timer)

    def _open(self, timer: int) -> None:
        if timer != self._timer:
            return
        begun, self._waiting = self._waiting, {}
        self._computing.update(begun)
        slowest = total = slow = 0.0
        tokens = 0
        for engine, forward in begun.items():
            attention_s = forward.attention_s * engine.slow
            total += attention_s
            tokens += forward.tokens
            slowest = max(slowest, attention_s)
            slow = max(slow, engine.slow)
        size = len(self.engines)
        seconds = slowest + slow * self._linear_s(tokens / size)
        self.slowest_s += slowest
        self.mean_s += total / size
        for engine, forward in begun.items():
            engine.begin(forward, seconds)
