"""Nodes that change their role while they serve: the driver of the policy's RoleController, on the virtual clock.

A switch: the node's engines drain; the moment they are idle they leave; the weights for the other role are read from
storage through the node's own NIC; its engines join again. Experts of a role are taken to be spread over all of its
nodes, however many these are, at the model's bytes a GPU.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import ConfigError
from common.types import Role
from loadgen.simulator.machines import Node
from loadgen.simulator.run import Simulation
from loadgen.simulator.scenario import Cluster
from services.scheduler.policy import RoleController, RolesConfig, SwitchRole, observe

#: Between two looks at engines that drain, seconds.
LOOK_S = 0.1
#: Of a GPU's memory, what weights may take: the rest is for KV.
WEIGHTS_SHARE = 0.75


def reload_s(cluster: Cluster) -> float:
    """Of a node's weights, through its storage NIC."""
    return weight_bytes(cluster) / cluster.snic_rate


def weight_bytes(cluster: Cluster) -> float:
    """In all GPUs of a node that are in use."""
    return cluster.model.weight_bytes_a_gpu * cluster.gpus * cluster.engines


def least_nodes(cluster: Cluster) -> int:
    """So many whole nodes hold the model's weights, and leave room for KV."""
    model, hardware = cluster.model, cluster.hardware
    room = WEIGHTS_SHARE * hardware.hbm_bytes - model.shared_params
    if room <= 0:
        return 1  # every GPU holds all, however tightly
    return max(1, math.ceil(model.expert_params / room / hardware.gpus))


def group_of(run: Simulation, role: Role) -> str:
    """The group of this role that has fewest engines: a node joins there."""
    groups = [group for group in run.groups.values() if group.role is role and group.engines]
    return min(groups, key=lambda group: (len(group.engines), group.name)).name if groups else f"{role.value}0"


@dataclass(slots=True)
class Switch:
    """One that was decided, with times on the clock: None as long as it has not come to that."""

    node: str
    to: Role
    decided: float
    empty: float | None = None
    serving: float | None = None


class AdaptiveRoles:
    """A Happening; one for each run. switch_s: instead of reading weights, this long (0: at once)."""

    def __init__(self, switch_s: float | None = None) -> None:
        if switch_s is not None and not 0 <= switch_s < math.inf:
            raise ConfigError(f"a node cannot take {switch_s} s to change its role: give 0 or more, or leave it out")
        self.switches: list[Switch] = []
        self.config: RolesConfig | None = None
        self._switch_s = switch_s

    def start(self, run: Simulation) -> None:
        cluster = run.scenario.cluster
        switch_s = reload_s(cluster) if self._switch_s is None else self._switch_s
        self.config = RolesConfig(switch_s, least_nodes(cluster))
        self._run = run
        self._controller = RoleController(self.config)
        run.clock.every(self.config.period_s, self._decide)

    def describe(self) -> dict[str, Any]:
        """node_s: for which nodes that switched did not serve, from empty to serving; drain_s: and served less."""
        done = [s for s in self.switches if s.empty is not None and s.serving is not None]
        return {
            "kind": "adaptive roles",
            "controller": None if self.config is None else asdict(self.config),
            "cost": "weights through the storage NIC" if self._switch_s is None else f"{self._switch_s:g} s",
            "switches": [asdict(switch) for switch in self.switches],
            "count": len(self.switches),
            "drain_s": sum(s.empty - s.decided for s in done if s.empty is not None),
            "node_s": sum(s.serving - s.empty for s in done if s.empty is not None and s.serving is not None),
        }

    def _decide(self) -> None:
        run = self._run
        for decision in self._controller.decide(observe(run.policy), run.clock.now):
            self._begin(decision)

    def _begin(self, decision: SwitchRole) -> None:
        run = self._run
        switch = Switch(decision.node, decision.to, run.clock.now)
        self.switches.append(switch)
        for engine in list(run.nodes[decision.node].engines):
            run.drain(engine)
        self._look(switch)

    def _look(self, switch: Switch) -> None:
        """Engines that are idle leave together: the weights of the whole node are loaded at once."""
        run = self._run
        node = run.nodes[switch.node]
        engines = list(node.engines)
        if any(engine.seq for engine in engines):
            run.at(run.clock.now + LOOK_S, self._look, switch)
            return
        if not engines:
            return  # it has failed
        for engine in engines:
            run.leave(engine)
        switch.empty = run.clock.now
        if self._switch_s is None:
            node.read(weight_bytes(run.scenario.cluster), self._back, (switch, node))
        else:
            run.at(run.clock.now + self._switch_s, self._back, (switch, node))

    def _back(self, which: tuple[Switch, Node]) -> None:
        switch, node = which
        if not node.snic_in.rate:
            return  # it has failed meanwhile
        run, cluster = self._run, self._run.scenario.cluster
        node.role = switch.to
        group = group_of(run, switch.to)
        number = len(self.switches)
        for index in range(cluster.engines):
            run.join(f"{node.name}.{index}/{number}", node, switch.to, group)
        switch.serving = run.clock.now
