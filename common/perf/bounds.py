"""The planner's formula: what bounds a cluster of xPyD nodes, in turns a second (spec §6, §10).

Every bound is an upper one: balanced load, full overlap, no queueing. A measured rate can only be lower.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from common.perf.compute import ComputeModel
from common.perf.hardware import Hardware
from common.perf.models import ModelProfile


class Resource(StrEnum):
    """What a turn needs."""

    PREFILL = "prefill compute"
    PE_SNICS = "storage NICs of the prefill nodes"
    ALL_SNICS = "all storage NICs"
    DECODE = "decode"


#: What each kind of system needs: Basic reads on the PE side, DualPath on both, Oracle reads nothing.
NEEDS = {
    "basic": (Resource.PREFILL, Resource.PE_SNICS, Resource.DECODE),
    "dualpath": (Resource.PREFILL, Resource.ALL_SNICS, Resource.DECODE),
    "oracle": (Resource.PREFILL, Resource.DECODE),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload's mean turn, in tokens."""

    hit: int
    miss: int
    generated: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Turns a second at most, and the resource that says so."""

    turns_per_s: float
    resource: Resource


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster of prefill_nodes and decode_nodes, `gpus` GPUs of each in use (all of them, or a scaled share)."""

    model: ModelProfile
    hardware: Hardware
    prefill_nodes: int
    decode_nodes: int
    turn: Turn
    gpus: int = 8

    def turns_per_s(self, resource: Resource) -> float:
        """Turns that the cluster could serve if all but this were free."""
        match resource:
            case Resource.PREFILL:
                node = ComputeModel(self.model, self.hardware, self.gpus)
                tokens = self.turn.hit + self.turn.miss
                return self.prefill_nodes * node.tokens_per_s(self.turn.hit, self.turn.miss) / tokens
            case Resource.PE_SNICS:
                return self.prefill_nodes * self._turns_read_per_s
            case Resource.ALL_SNICS:
                return (self.prefill_nodes + self.decode_nodes) * self._turns_read_per_s
            case Resource.DECODE:
                return self.decode_nodes * self.gpus * self._turns_decoded_per_s

    def bound(self, system: str) -> Bound:
        """The resource that binds a system (a key of NEEDS)."""
        return min((Bound(self.turns_per_s(need), need) for need in NEEDS[system]), key=lambda bound: bound.turns_per_s)

    def turn_s(self, system: str) -> float:
        """Time of one turn in an idle cluster: read by one node's NIC, then prefilled, then decoded."""
        gpu = ComputeModel(self.model, self.hardware)
        prefill_s = gpu.prefill_s([(self.turn.hit, self.turn.miss)]).total_s
        decode_s = self.turn.generated * gpu.decode_step_s([self._context])
        read_s = 0.0 if system == "oracle" else self.turn.hit * self.model.kv_bytes_per_token / self._snic_rate
        return read_s + prefill_s + decode_s

    def job_completion_s(self, system: str, agents: int, turns: int) -> float:
        """Least time for that many agents of that many turns each, all starting at once."""
        return max(agents * turns / self.bound(system).turns_per_s, turns * self.turn_s(system))

    def describe(self, agents: int = 0, turns: int = 0) -> dict[str, object]:
        """For a result's JSON. With agents and turns, least job completion times too. bottleneck_free: between which
        ratios of prefill to decode nodes nothing binds before the storage NICs do."""
        systems: dict[str, dict[str, object]] = {}
        for system in NEEDS:
            bound = self.bound(system)
            systems[system] = {"turns_per_s": bound.turns_per_s, "bound_by": str(bound.resource)}
            if agents and turns:
                systems[system]["job_completion_s"] = self.job_completion_s(system, agents, turns)
        node = self.hardware
        free = bottleneck_free_range(node.gpus, node.snic_rate / node.cnic_rate, node.cnic_rate, node.dram_rate)
        return {
            "turns_per_s": {str(r): self.turns_per_s(r) for r in Resource},
            "systems": systems,
            "prefill_per_decode": self.prefill_nodes / self.decode_nodes,
            "bottleneck_free": free,
        }

    # -- parts --

    @property
    def _context(self) -> int:
        """Mean context while decoding."""
        return self.turn.hit + self.turn.miss + max(1, self.turn.generated // 2)

    @property
    def _snic_rate(self) -> float:
        """Bytes a second of a node's storage NIC, or of the share that the GPUs in use have in it."""
        return self.hardware.snic_rate * self.gpus / self.hardware.gpus

    @property
    def _turns_read_per_s(self) -> float:
        return self._snic_rate / (self.turn.hit * self.model.kv_bytes_per_token)

    @property
    def _turns_decoded_per_s(self) -> float:
        """By one GPU, whose memory is full of sequences: more sequences a step never make fewer tokens a second."""
        gpu = ComputeModel(self.model, self.hardware)
        sequences = max(1, gpu.kv_tokens() // self._context)
        return sequences / (self.turn.generated * gpu.decode_step_s([self._context] * sequences))


@dataclass(frozen=True, slots=True)
class RatioLimit:
    """One of the conditions under which a resource does not bind before the storage NICs do (spec §6). least, greatest:
    prefill nodes over decode nodes; a condition that does not depend on them allows all of them (0 to inf) or none
    (least above greatest)."""

    resource: str
    rule: str
    least: float = 0.0
    greatest: float = inf


def ratio_limits(gpus: int, snic_share: float, cnic_rate: float, dram_rate: float) -> list[RatioLimit]:
    """All six. snic_share: the node's storage NIC in units of one compute NIC; rates in bytes a second."""
    g, s = gpus, snic_share
    storage_rate = s * cnic_rate

    def always(resource: str, rule: str, holds: bool) -> RatioLimit:
        return RatioLimit(resource, rule) if holds else RatioLimit(resource, rule, inf, 0.0)

    return [
        always("PE compute NIC, read", "s <= g/2", s <= g / 2),
        RatioLimit("PE compute NIC, write", "P/D >= s/(g-s)", least=s / (g - s) if s < g else inf),
        RatioLimit("DE compute NIC, read", "P/D <= (g-2s)/s", greatest=(g - 2 * s) / s),
        RatioLimit("DE compute NIC, write", "P/D <= (g-s)/(2s)", greatest=(g - s) / (2 * s)),
        always("PE DRAM", "2sB <= M", 2 * storage_rate <= dram_rate),
        RatioLimit("DE DRAM", "P/D <= (M/(sB)-3)/2", greatest=(dram_rate / storage_rate - 3) / 2),
    ]


def bottleneck_free_range(
    gpus: int, snic_share: float, cnic_rate: float, dram_rate: float
) -> tuple[float, float] | None:
    """P/D ratios (least, greatest) at which neither compute NICs nor DRAM bind before the storage NICs; None if there
    are none (spec §6). snic_share: the node's storage NIC in units of one compute NIC."""
    limits = ratio_limits(gpus, snic_share, cnic_rate, dram_rate)
    least, greatest = max(limit.least for limit in limits), min(limit.greatest for limit in limits)
    return (least, greatest) if least <= greatest else None


def shares_when_saturated(
    gpus: int, snic_share: float, cnic_rate: float, dram_rate: float, prefill_per_decode: float
) -> dict[str, float]:
    """Which share of each resource of ratio_limits() is in use, by the same names, while all storage NICs are saturated
    and load is balanced (spec §6). Above 1 it binds before they do."""
    one, storage_rate, ratio = snic_share / gpus, snic_share * cnic_rate, prefill_per_decode
    return {
        "PE compute NIC, read": 2 * one,
        "PE compute NIC, write": one * (1 + 1 / ratio),
        "DE compute NIC, read": one * (ratio + 2),
        "DE compute NIC, write": one * (2 * ratio + 1),
        "PE DRAM": 2 * storage_rate / dram_rate,
        "DE DRAM": (3 + 2 * ratio) * storage_rate / dram_rate,
    }
