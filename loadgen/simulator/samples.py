"""What is looked at while a run goes on, like the counters of a live cluster: traffic and attention, for balance."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from loadgen.measures.balance import WINDOW_S, Series
from loadgen.simulator.clock import Clock
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Group, Node
from loadgen.simulator.prefill import PrefillEngine


class Counters:
    """Values that only grow, by name, at times that all names share. One that comes later was 0 before; one that has
    gone stays as it was."""

    def __init__(self) -> None:
        self.values: dict[str, array[float]] = {}

    def add(self, index: int, told: Mapping[str, float]) -> None:
        """At the time of this index."""
        for name, value in told.items():
            if name not in self.values:
                self.values[name] = array("d", bytes(8 * index))
            self.values[name].append(value)
        for values in self.values.values():
            if len(values) == index:
                values.append(values[-1] if index else 0.0)


class Sampler:
    """Looks at the nodes and groups of a run, by name, every WINDOW_S, from its start on, and when asked to."""

    def __init__(self, clock: Clock, nodes: Mapping[str, Node], groups: Mapping[str, Group]) -> None:
        self._clock = clock
        self._nodes = nodes
        self._groups = groups
        self._times = array("d")
        self._snic = Counters()
        self._attention: dict[str, Counters] = {}
        self._rounds: dict[str, Counters] = {}

    def start(self) -> None:
        self.sample()
        self._clock.every(WINDOW_S, self.sample)

    def sample(self) -> None:
        now, index = self._clock.now, len(self._times)
        self._times.append(now)
        nodes = self._nodes.items()
        self._snic.add(index, {name: node.snic_in.served(now) + node.snic_out.sent for name, node in nodes})
        for name, group in self._groups.items():
            if isinstance(group, PrefillGroup):
                engines = self._attention.setdefault(name, Counters())
                engines.add(index, {e.name: e.attention_s for e in group.engines if isinstance(e, PrefillEngine)})
                rounds = self._rounds.setdefault(name, Counters())
                rounds.add(index, {"slowest": group.slowest_s, "mean": group.mean_s})

    @property
    def snic(self) -> Series:
        """Bytes of KV through each node's storage NIC, both ways."""
        return self._series(self._snic)

    @property
    def attention(self) -> dict[str, Series]:
        """Seconds of each engine, by group."""
        return {name: self._series(counters) for name, counters in self._attention.items()}

    @property
    def rounds(self) -> dict[str, Series]:
        """Seconds of the slowest and of the mean engine, by group."""
        return {name: self._series(counters) for name, counters in self._rounds.items()}

    def _series(self, counters: Counters) -> Series:
        values = {name: values.tolist() for name, values in counters.values.items()}
        return Series(self._times.tolist(), values)
