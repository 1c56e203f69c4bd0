"""Which node changes its role, and when: prefill and decode nodes follow the load (spec §12). Pure.

A side is what the others wait for if it is busy. What one node more would bring it follows from how busy both sides
are, since work stays and nodes change: with u the share of a side in use, P and D its nodes,

    throughput can become 1 / max(u_P, u_D) of what it is, and after a move, min((P + 1) / P u_P, (D - 1) / D u_D).

A switch costs node-seconds: those of draining, of coming back with other weights, and of getting work. It is made once
the throughput that the lack of it has cost, in node-seconds as well, is as much: as one rents skis until the rent has
reached their price. What one direction has cost counts against the other, and is forgotten in time; so a load that
stays leads to one place and to rest there, chance alone leads nowhere, and a load that changes costs at most about
twice what it must. Where the arithmetic is wrong, one switch would follow the other back and forth: each that takes
back the one before makes the next one dearer, twofold, which is forgotten in time as well.

One switch at a time, of one node, or of several if each of them is worth most of a node, and of no more than a part of
the cluster; never one of the last that a role needs, none before its time in a role is over. A driver executes a
decision: it drains the node's engines, which leave when they are idle and join again in the other role.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple

from common.types import Role
from services.scheduler.policy.role_view import NodeLoad, View

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class RolesConfig:
    """switch_s: what a node takes from being empty to serving in its other role: its weights are loaded again. least:
    nodes that a role needs at least, to hold the model.

    The others are the same for every cluster and load. period_s: between two decide(). window_s: over which use is
    averaged. settle_s: after a change, before anything counts. memory_s: in which cost is forgotten. busy: a side with
    so much of it in use is what the others wait for. dwell_s: a node keeps a role so long. patience: a switch that
    takes so many times what it was to cost is given up. at_once: of the cluster, what may switch together (one node
    always may). worth: of what a node serves, what each further one of these must bring.
    """

    switch_s: float
    least: int = 1
    period_s: float = 1.0
    window_s: float = 5.0
    settle_s: float = 10.0
    memory_s: float = 300.0
    busy: float = 0.9
    dwell_s: float = 60.0
    patience: float = 10.0
    at_once: float = 0.25
    worth: float = 0.5


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """The node's engines finish what they have been told to do, leave, and join again in the other role."""

    node: str
    to: Role


class RoleController:
    """decide() is the only way in; it neither waits nor reads a clock."""

    def __init__(self, config: RolesConfig) -> None:
        self.config = config
        self.regret = 0.0  # node-seconds that fewer prefill nodes than would do have cost; below 0: decode nodes
        self.switching: tuple[SwitchRole, ...] = ()  # decided, and not yet at their end
        self._until = 0.0  # after which it is given up
        self._last: tuple[Role, float] | None = None  # what the last one was for, and when it was decided
        self._wary = 1.0  # by which a switch is dearer than it is
        self._since: dict[str, tuple[Role, float]] = {}  # each node's role, and when it was first seen in it
        self._averages: _Averages | None = None

    def decide(self, view: View, now: float) -> list[SwitchRole]:
        """What is to be done now: nothing, mostly. now: seconds on any monotonic scale, growing from call to call."""
        self._note(view, now)
        if self.switching:
            if not self._have_ended(now):
                return []
            self.switching, self._averages, self.regret = (), None, 0.0  # what is now is not what was
        if self._averages is None:
            self._averages = _Averages(view, now)
            return []
        averages, config = self._averages, self.config
        seconds = averages.add(view, now, config.window_s)
        if now - averages.began < config.settle_s:
            return []
        sides = averages.sides(view, config.busy)
        gains = {role: gain(sides[role], sides[_OTHER[role]], config) for role in sides}
        self.regret *= max(1.0 - seconds / config.memory_s, 0.0)
        self.regret += seconds * (gains[Role.PREFILL] - gains[Role.DECODE])
        to = Role.PREFILL if self.regret > 0 else Role.DECODE
        cost = config.switch_s + averages.stay_s(view)
        wary = self._dearer(to, now)
        if not gains[to] or abs(self.regret) < cost * wary:
            return []
        cautious = averages.sides(view, config.busy, discount=False)
        count = self._count(cautious[to], cautious[_OTHER[to]])
        self.switching = tuple(SwitchRole(name, to) for name in self._choose(view.of(_OTHER[to]), count, now))
        if self.switching:
            self._until = now + config.patience * cost
            self._last, self._wary = (to, now), wary
        return list(self.switching)

    def _dearer(self, to: Role, now: float) -> float:
        """By how much a switch is dearer now, for having been taken back and forth before."""
        if self._last is None:
            return 1.0
        last, at = self._last
        left = self._wary * (2.0 if to is not last else 1.0) - 1.0
        return 1.0 + left * exp((at - now) / self.config.memory_s)

    def _count(self, side: Side, other: Side) -> int:
        """How many nodes go at once."""
        config, count = self.config, 1
        most = max(int(config.at_once * (side.nodes + other.nodes)), 1)
        while count < most:
            further = gain(side, other, config, count + 1) - gain(side, other, config, count)
            if further < config.worth:
                break
            count += 1
        return count

    def _note(self, view: View, now: float) -> None:
        """Since when each node has its role; those of the first view have had theirs for long."""
        before = -self.config.dwell_s if not self._since else 0.0
        for node in view.nodes:
            role, _ = self._since.get(node.name, (None, 0.0))
            if role is not node.role:
                self._since[node.name] = (node.role, now + before)

    def _have_ended(self, now: float) -> bool:
        """The nodes serve in their new role, or are given up."""
        return now > self._until or all(self._since[switch.node][0] is switch.to for switch in self.switching)

    def _choose(self, nodes: list[NodeLoad], count: int, now: float) -> list[str]:
        """Those with least to finish, of those whose time is over. One whose largest request no other one that stays
        can hold, stays."""
        staying = sorted(nodes, key=lambda node: (node.in_hand, node.name))
        chosen: list[str] = []
        for node in list(staying):
            others = [other for other in staying if other is not node]
            replaced = any(
                other.buffer_blocks >= node.buffer_blocks and other.device_tokens >= node.device_tokens
                for other in others
            )
            if len(chosen) < count and replaced and now - self._since[node.name][1] >= self.config.dwell_s:
                chosen.append(node.name)
                staying = others
        return chosen


class Side(NamedTuple):
    """nodes that serve; used: how much of them is in use, 0 to 1."""

    nodes: int
    used: float


def gain(side: Side, other: Side, config: RolesConfig, count: int = 1) -> float:
    """What so many nodes more of a side would bring, taken from the other one: throughput in units of what one node of
    the side serves now, 0 to count. 0 if the side is not what the others wait for, or if the other one cannot spare
    them."""
    if side.used < config.busy or other.nodes - count < config.least:
        return 0.0
    now, after = 1 / side.used, (side.nodes + count) / (side.nodes * side.used)
    if other.used:
        now = min(now, 1 / other.used)
        after = min(after, (other.nodes - count) / (other.nodes * other.used))
    return max(after / now - 1, 0.0) * side.nodes


class _Averages:
    """Of what was seen since `began`, recent views counting most."""

    def __init__(self, view: View, now: float) -> None:
        self.began = self._at = now
        self._prefill, self._decode, self._promised, self._staged = _means(view)
        self._started, self._rate = view.started, 0.0

    def add(self, view: View, now: float, window_s: float) -> float:
        """Seconds since the last view."""
        seconds = now - self._at
        if seconds <= 0:
            return 0.0
        weight = min(seconds / min(window_s, now - self.began), 1.0)  # at first all views count alike
        prefill, decode, promised, staged = _means(view)
        self._prefill += weight * (prefill - self._prefill)
        self._decode += weight * (decode - self._decode)
        self._promised += weight * (promised - self._promised)
        self._staged += weight * (staged - self._staged)
        self._rate += weight * (max(view.started - self._started, 0) / seconds - self._rate)
        self._started, self._at = view.started, now
        return seconds

    def sides(self, view: View, busy: float, discount: bool = True) -> dict[Role, Side]:
        """The busier prefill is, the less counts what its requests have of decode nodes: how much of it they need if
        prefill is faster will be seen then. discount False: all of it counts."""
        idle = min((1.0 - self._prefill) / (1.0 - busy), 1.0) if discount else 1.0
        used = max(self._decode + idle * self._promised, idle * self._staged)
        return {
            Role.PREFILL: Side(len(view.of(Role.PREFILL)), self._prefill),
            Role.DECODE: Side(len(view.of(Role.DECODE)), min(used, 1.0)),
        }

    def stay_s(self, view: View) -> float:
        """Mean time that a request spends on both sides (Little's law): so long a node that drains serves less and
        less, and one that comes back more and more. Infinite if nothing moves: then nobody knows."""
        in_hand = sum(node.in_hand for node in view.nodes)
        if not in_hand:
            return 0.0
        return in_hand / self._rate if self._rate else inf


def _means(view: View) -> tuple[float, float, float, float]:
    """Of use: prefill, decode, promised, staged. A side without a node counts as idle."""
    prefill, decode = view.of(Role.PREFILL), view.of(Role.DECODE)
    return (
        sum(node.used for node in prefill) / max(len(prefill), 1),
        sum(node.used for node in decode) / max(len(decode), 1),
        sum(node.promised for node in decode) / max(len(decode), 1),
        sum(node.staged for node in decode) / max(len(decode), 1),
    )
