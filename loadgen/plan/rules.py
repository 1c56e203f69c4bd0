"""What a cluster has to have before it is worth simulating: each rule refuses by name, with the nearest valid value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, isfinite

from common.errors import ConfigError
from common.perf.hardware import HARDWARE, Hardware
from common.perf.models import MODELS, ModelProfile
from common.perf.units import parse_rate, show_rate
from common.workload.table2 import TABLE2
from compose.fabric import parse_shape
from loadgen.experiments.options import one_of
from loadgen.measures.turns import Slo
from loadgen.paper.calibration import ONLINE
from loadgen.simulator import Cluster
from loadgen.systems import SYSTEMS
from loadgen.workload.source import Source

MAX_GPUS, MAX_APS = 64, 1000.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody plans for. shape: nodes that are given, else they are searched for."""

    model: ModelProfile
    hardware: Hardware
    source: Source
    aps: float
    system: str
    slo: Slo
    shape: tuple[int, int] | None = None

    def cluster(self, prefill: int, decode: int) -> Cluster:
        return Cluster(prefill, decode, self.model, self.hardware, engines=self.hardware.gpus)

    @property
    def least_nodes(self) -> tuple[int, int]:
        """As the model is deployed: its experts need expert_gpus GPUs that decode, and half as many that prefill."""
        gpus = self.hardware.gpus
        return ceil(self.model.expert_gpus / 2 / gpus), ceil(self.model.expert_gpus / gpus)


def asked(
    model: str,
    hardware: Hardware,
    workload: str,
    aps: float,
    system: str,
    slo: Slo,
    nodes: str | None,
) -> Asked:
    """ConfigError for what cannot be."""
    profile = ONLINE.model(MODELS[one_of("--model", model, MODELS)])
    source = Source(set=one_of("--workload", workload.upper(), TABLE2))
    one_of("--system", system, SYSTEMS)
    if not (isfinite(aps) and 0 < aps <= MAX_APS):
        nearest = MAX_APS if aps > MAX_APS else 0.1
        raise ConfigError(f"--aps {aps:g} must be above 0 and at most {MAX_APS:g} agents a second: write {nearest:g}")
    check_objectives(slo)
    wanted = Asked(profile, hardware, source, aps, system, slo, parse_shape(nodes) if nodes else None)
    check_memory(wanted)
    check_nodes(wanted)
    return wanted


def check_objectives(slo: Slo) -> None:
    usual = Slo()
    for option, value, say in (("--slo-ttft", slo.ttft_s, usual.ttft_s), ("--slo-tpot", slo.tpot_s, usual.tpot_s)):
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{option} {value:g} must be above 0, in seconds: write, say, {say:g}")


def machine(name: str, gpus: int, cnic: str, snic: str, dram: str) -> Hardware:
    """A node of these parts, whose computing is as efficient as fits the paper's online latencies. ConfigError for one
    that is none."""
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(
            f"--gpus-per-node {gpus} must be from 1 to {MAX_GPUS}: the nearest is {min(max(gpus, 1), MAX_GPUS)}"
        )
    node = replace(
        HARDWARE[one_of("--hardware", name, HARDWARE)],
        efficiency=ONLINE.hardware.efficiency,
        gpus=gpus,
        cnic_rate=parse_rate("--cnic", cnic),
        snic_rate=parse_rate("--snic", snic),
        dram_rate=parse_rate("--dram", dram),
    )
    check_rates(node)
    return node


def check_rates(node: Hardware) -> None:
    """The rules of the bottleneck-free range that no ratio of nodes can mend (spec §6)."""
    most = min(node.gpus * node.cnic_rate / 2, node.dram_rate / 2)
    if node.snic_rate > most:
        which = "half of the compute NICs" if most == node.gpus * node.cnic_rate / 2 else "half of DRAM"
        raise ConfigError(
            f"--snic {show_rate(node.snic_rate)} is more than {which} of a node can carry (every byte read passes"
            f" them twice): at most {show_rate(most)}"
        )


def check_memory(wanted: Asked) -> None:
    """The model's weights, and the longest context in every place that holds one."""
    model, hardware = wanted.model, wanted.hardware
    cluster = wanted.cluster(*wanted.least_nodes)
    weights, room = model.weight_bytes_a_gpu, 0.9 * hardware.hbm_bytes
    if weights >= room:
        raise ConfigError(
            f"{model.name} does not fit: {weights / 1e9:.1f} GB of weights a GPU, {room / 1e9:.1f} GB of HBM for them"
        )
    longest, held = wanted.source.max_length(model.max_context_tokens), cluster.limit
    if held < longest:
        buffer = model.dram_bytes / hardware.gpus
        sets = [name for name, columns in TABLE2.items() if columns.max_length <= held]
        nearest = f"--workload {sets[-1].lower()}" if sets else f"--gpus-per-node {_fitting_gpus(wanted, longest)}"
        raise ConfigError(
            f"a context of {longest:,} tokens has {longest * model.kv_bytes_per_token / 1e9:.2f} GB of KV, but a GPU's"
            f" share of staging DRAM is {buffer / 1e9:.2f} GB and at most {held:,} tokens fit everywhere: the nearest"
            f" is {nearest}"
        )


def _fitting_gpus(wanted: Asked, tokens: int) -> int:
    """Most GPUs a node with which the node's DRAM has room for such a context on each."""
    return max(1, int(wanted.model.dram_bytes // (tokens * wanted.model.kv_bytes_per_token)))


def check_nodes(wanted: Asked, option: str = "--nodes") -> None:
    """Enough GPUs of each role for the model's experts. option: that gave the shape."""
    if wanted.shape is None:
        return
    least = wanted.least_nodes
    prefill, decode = (max(have, need) for have, need in zip(wanted.shape, least, strict=True))
    if (prefill, decode) != wanted.shape:
        have = "{}P{}D".format(*wanted.shape)
        raise ConfigError(
            f"{option} {have}: {wanted.model.name} does not fit: its experts need {least[0]} prefill and {least[1]}"
            f" decode nodes of {wanted.hardware.gpus} GPUs at least: the nearest is {prefill}P{decode}D"
        )
