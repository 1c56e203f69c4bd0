"""What goes wrong in a run, or changes: engines that fail, slow down or join; a storage NIC that others use as well.

Written as KIND:WHERE@FROM, with -UNTIL and :AMOUNT where the kind has one; times in seconds of the run.

    fail:d1@60             node d1 (or one engine: fail:d1.3@60) computes no more, and is given up when its heartbeats
                           have been missing for as long as the live scheduler waits
    slow:p0@60-120:2       computes so many times slower
    nics:p0@60-120:4       its NICs, storage and compute, have a fourth of their rate
    foreign:p0@60-120:20e9 so many bytes a second of other traffic come in through its storage NIC, as far as there is
                           room for them beside half of the rate for KV; foreign:*@... through that of every node
    join:decode@60         one more node
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from common.config import TimeoutsConfig
from common.errors import ConfigError
from common.types import Role
from loadgen.simulator.machines import FOREIGN, Engine, Node
from loadgen.simulator.roles import group_of
from loadgen.simulator.run import Simulation
from loadgen.simulator.scenario import Happening

#: Every so often a piece of foreign traffic is sent, seconds.
PIECE_S = 0.05
ALL = "*"
_FORM = re.compile(r"(\w+):([^@]+)@([^-:]+)(?:-([^:]+))?(?::(.+))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """A node or an engine computes and says no more; a node's storage NIC stands still. unnoticed_s: until the
    scheduler gives it up."""

    where: str
    at: float
    unnoticed_s: float = TimeoutsConfig().heartbeat_timeout_s

    def start(self, run: Simulation) -> None:
        _check_where(run, self.where)
        run.at(self.at, self._fail, run)

    def _fail(self, run: Simulation) -> None:
        lost = _engines(run, self.where)
        for engine in lost:
            engine.die()
        if self.where in run.nodes:
            run.nodes[self.where].snic_in.set_rate(run.clock.now, 0.0)
        run.at(run.clock.now + self.unnoticed_s, self._noticed, (run, lost))

    def _noticed(self, which: tuple[Simulation, list[Engine]]) -> None:
        run, lost = which
        for engine in lost:
            if engine.name in run.engines:
                run.leave(engine)

    def describe(self) -> dict[str, Any]:
        return _described("fail", self)


@dataclass(frozen=True, slots=True)
class Slow:
    """A node or an engine computes `factor` times slower between two times."""

    where: str
    at: float
    until: float
    factor: float

    def start(self, run: Simulation) -> None:
        _check_where(run, self.where)
        _between(run, self.at, self.until, lambda: self._set(run, self.factor), lambda: self._set(run, 1.0))

    def _set(self, run: Simulation, factor: float) -> None:
        for engine in _engines(run, self.where):
            engine.set_slow(factor)

    def describe(self) -> dict[str, Any]:
        return _described("slow", self)


@dataclass(frozen=True, slots=True)
class SlowNics:
    """A node's NICs have their rate divided by `factor` between two times."""

    where: str
    at: float
    until: float
    factor: float

    def start(self, run: Simulation) -> None:
        _node(run, self.where)
        _between(run, self.at, self.until, lambda: self._set(run, self.factor), lambda: self._set(run, 1.0))

    def _set(self, run: Simulation, factor: float) -> None:
        node = run.nodes[self.where]
        node.set_rate(run.scenario.cluster.snic_rate / factor)
        for engine in node.engines:
            engine.tx.rate = engine.rx.rate = run.constants.cnic_rate / factor

    def describe(self) -> dict[str, Any]:
        return _described("nics", self)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Other traffic comes in through a node's storage NIC (ALL: every node's), `rate` bytes a second between two times.

    A piece is sent every PIECE_S, but not while an earlier one has not come through: what finds no room is not made up
    for.
    """

    where: str
    at: float
    until: float
    rate: float

    def start(self, run: Simulation) -> None:
        if self.where != ALL:
            _node(run, self.where)
        for node in list(run.nodes.values()):
            if self.where in (ALL, node.name):
                self._flow(run, node)

    def _flow(self, run: Simulation, node: Node) -> None:
        under_way = False

        def through(_: None) -> None:
            nonlocal under_way
            under_way = False

        def piece() -> None:
            nonlocal under_way
            if self.at <= run.clock.now < self.until and not under_way:
                under_way = True
                node.read(self.rate * PIECE_S, through, None, FOREIGN)

        run.clock.every(PIECE_S, piece)

    def describe(self) -> dict[str, Any]:
        return _described("foreign", self)


@dataclass(frozen=True, slots=True)
class Join:
    """One more node."""

    role: Role
    at: float

    def start(self, run: Simulation) -> None:
        run.at(self.at, self._join, run)

    def _join(self, run: Simulation) -> None:
        letter = self.role.value[0]
        number = sum(name.startswith(letter) for name in run.nodes)
        run.add_node(f"{letter}{number}", self.role, group_of(run, self.role))

    def describe(self) -> dict[str, Any]:
        return _described("join", self)


def _described(kind: str, incident: Any) -> dict[str, Any]:
    """until: None without an end."""
    return {"kind": kind, **{name: None if value == inf else value for name, value in asdict(incident).items()}}


def parse_incidents(texts: Iterable[str]) -> tuple[Happening, ...]:
    """ConfigError for one that is none."""
    return tuple(_parsed(text) for text in texts)


def _parsed(text: str) -> Happening:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--incident {text!r}: write KIND:WHERE@FROM[-UNTIL][:AMOUNT], as in slow:p0@60-120:2")
    kind, where, start, end, amount = match.groups()
    if kind not in _KINDS:
        raise ConfigError(f"--incident {text!r}: {kind!r} is none: one of {', '.join(_KINDS)}")
    takes_span, make = _KINDS[kind]
    if not takes_span and (end or amount):
        raise ConfigError(f"--incident {text!r}: {kind} has a time only: {kind}:{where}@{start}")
    if takes_span and not amount:
        raise ConfigError(f"--incident {text!r}: {kind} needs an amount: {kind}:{where}@{start}:2")
    at = _number(text, start, 0.0)
    if not takes_span:
        return make(where, at)
    until = _number(text, end, at) if end else inf
    if until <= at:
        raise ConfigError(f"--incident {text!r}: it ends at {until:g} s, but begins at {at:g} s")
    return make(where, at, until, _number(text, amount, 0.0, above=True))


def _join(where: str, at: float) -> Join:
    if where not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"--incident join:{where}: one of prefill, decode")
    return Join(Role(where), at)


#: Whether it has a span of time and an amount, and how it is made.
_KINDS: dict[str, tuple[bool, Callable[..., Happening]]] = {
    "fail": (False, Failure),
    "slow": (True, Slow),
    "nics": (True, SlowNics),
    "foreign": (True, Foreign),
    "join": (False, _join),
}


def _number(text: str, part: str, least: float, above: bool = False) -> float:
    try:
        value = float(part)
    except ValueError:
        value = inf
    if not least <= value < inf or (above and value == least):
        wanted = f"above {least:g}" if above else f"of {least:g} or more"
        raise ConfigError(f"--incident {text!r}: {part!r} is not a number {wanted}")
    return value


def _between(run: Simulation, at: float, until: float, begin: Callable[[], None], end: Callable[[], None]) -> None:
    run.at(at, lambda _: begin())
    if until < inf:
        run.at(until, lambda _: end())


def _node(run: Simulation, where: str) -> Node:
    """ConfigError if there is none of this name."""
    if where not in run.nodes:
        raise ConfigError(f"--incident on {where!r}: the nodes are {_named(run.nodes)}")
    return run.nodes[where]


def _check_where(run: Simulation, where: str) -> None:
    if where not in run.engines:
        _node(run, where)


def _engines(run: Simulation, where: str) -> list[Engine]:
    """Of a node, or the one of this name; those that are there by now."""
    if where in run.nodes:
        return list(run.nodes[where].engines)
    return [run.engines[where]] if where in run.engines else []


def _named(names: Sequence[str] | dict[str, Any]) -> str:
    shown = list(names)
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:3])}, ... {shown[-1]}"
