"""What is simulated: a cluster, a system of loadgen.systems on it, a load, and what else happens meanwhile.

Everything is in the real cluster's bytes and seconds. `offline()` and `online()` make scenarios of the paper's kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from common.errors import ConfigError
from common.perf.bounds import Turn
from common.perf.hardware import Hardware, get_hardware
from common.perf.models import ModelProfile, get_model_profile
from common.perf.scaling import Scaling
from common.workload.arrivals import gamma_arrivals
from common.workload.extend import Extended
from common.workload.hits import BLOCK_TOKENS, pooled
from common.workload.trajectories import Trajectory
from common.workload.windows import windows
from loadgen.measures.turns import Slo
from loadgen.systems import BATCH_TOKENS, SYSTEMS
from loadgen.workload.load import Arrival, Load, Offline, Online
from loadgen.workload.source import Played, Source


@dataclass(frozen=True, slots=True)
class Cluster:
    """xPyD nodes of `engines` engines, each of which stands for `gpus` GPUs. The node's storage NIC and DRAM are
    scaled to the GPUs in use: engines * gpus of hardware.gpus (a whole node: 8 x 1; a live, scaled one: 1 x 1).

    prefill_group, decode_group: nodes whose engines are scheduled together and, in prefill, meet at every layer. 0: as
    the model is deployed: experts that need several nodes make groups of so many decode nodes and half as many prefill
    nodes (2P4D is one unit), else each node is a group. moved_layers: in so many parts KV moves (0: as the model has
    layers); copies_free: those between host and device take no time. Both are for comparison with live clusters, which
    move fewer, larger layers and may leave copies unpaced.
    """

    prefill_nodes: int
    decode_nodes: int
    model: ModelProfile = field(default_factory=lambda: get_model_profile("ds-660b"))
    hardware: Hardware = field(default_factory=lambda: get_hardware("h800"))
    engines: int = 8
    gpus: int = 1
    prefill_group: int = 0
    decode_group: int = 0
    moved_layers: int = 0
    copies_free: bool = False

    @property
    def name(self) -> str:
        return f"{self.prefill_nodes}P{self.decode_nodes}D"

    @property
    def scaling(self) -> Scaling:
        """Of one engine, nothing made smaller: its times and bytes are the real ones."""
        layers = self.moved_layers or self.model.layers
        return Scaling(self.model, self.hardware, self.gpus, 1.0, layers, self.model.kv_bytes_per_token // layers)

    @property
    def snic_rate(self) -> float:
        """Bytes a second of a node's storage NIC, each way."""
        return self.engines * self.scaling.snic_rate

    @property
    def decode_nodes_together(self) -> int:
        """Nodes of a decode group."""
        return self.decode_group or max(1, self.model.expert_gpus // self.hardware.gpus)

    @property
    def prefill_nodes_together(self) -> int:
        """Nodes of a prefill group."""
        return self.prefill_group or max(1, self.model.expert_gpus // self.hardware.gpus // 2)

    @property
    def limit(self) -> int:
        """Of a context, in tokens: the model's, or what every system can hold (Basic: all layers in the device memory
        of a prefill engine)."""
        scaling = self.scaling
        memory = min(scaling.prefill_memory, scaling.decode_memory, scaling.buffer)
        held = memory // scaling.geometry(BLOCK_TOKENS).full_block_bytes * BLOCK_TOKENS
        return min(self.model.max_context_tokens, held)


class Happening(Protocol):
    """What else happens in a run (engines that fail, slow down, join or change their role, foreign traffic): it puts
    its first events on the clock before the run starts, and may put further ones from within these."""

    def start(self, run: Any) -> None:
        """run: the loadgen.simulator.run.Simulation, which a scenario does not know. run.at(time, function, argument)
        calls function(argument) at a time; run.engines, run.nodes and their methods are what may be changed; a new set
        of happenings must not be shared by two runs if it keeps state."""

    def describe(self) -> dict[str, Any]:
        """For the result's JSON."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Constants of the control plane, real seconds, the same for every system. turn_s: from an agent's sending of
    a turn to the scheduler. report_s: how long a changed load waits for others before a group's leader fetches (live
    engines, on one host: 5 ms). gather_s: how long a round of a prefill group waits for engines that have no forward
    yet. forward_s: from the plan of a layerwise forward to the engine's knowing that its first layers are there, beside
    their load. handover_s: from the arrival of a request's last rows to the decode engine's knowing of it."""

    turn_s: float = 0.0
    report_s: float = 0.02
    gather_s: float = 0.0
    forward_s: float = 0.0
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """system: a key of loadgen.systems.SYSTEMS. mean_turn: of the workload, from which alpha and beta follow.
    incidents: see Happening. roles: a controller that changes roles of nodes, likewise. batch_tokens: new tokens of a
    prefill forward, at most. ConfigError for a scenario that cannot be."""

    cluster: Cluster
    system: str
    load: Load
    mean_turn: Turn
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    incidents: tuple[Happening, ...] = ()
    roles: Happening | None = None
    overheads: Overheads = Overheads()
    origin: str = ""
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ConfigError(f"--system {self.system!r} is unknown: one of {', '.join(SYSTEMS)}")


def offline(
    cluster: Cluster,
    system: str,
    source: Source,
    agents: int,
    trajectories: int | None = None,
    turns: int | None = None,
    whole: bool = True,
    seed: int = 0,
    **others: Any,
) -> Scenario:
    """agents start at once and play `trajectories` (default: one each). turns: windows of so many turns instead of
    whole trajectories. whole: to the last agent's end. others: further fields of Scenario."""
    played, turn, origin = _played(cluster, source, trajectories or agents, turns, seed)
    return Scenario(cluster, system, Offline(played, agents, whole), turn, seed, origin=origin, **others)


def online(
    cluster: Cluster,
    system: str,
    source: Source,
    aps: float,
    duration_s: float,
    turns: int | None = None,
    cv: float = 1.0,
    slo: Slo | None = None,
    misses: int | None = None,
    seed: int = 0,
    **others: Any,
) -> Scenario:
    """Agents arrive at this rate for so long; each plays a trajectory, or a window of so many turns. misses: of the
    objective for TTFT, before the run is given up (default: never)."""
    slo = slo or Slo()
    times = gamma_arrivals(aps, duration_s, cv, seed)
    if not times:
        raise ConfigError(f"no agent arrives in {duration_s:g} s at {aps:g} agents a second: raise --duration or --aps")
    played, turn, origin = _played(cluster, source, len(times), turns, seed)
    arrivals = [
        Arrival(at, f"{trajectory.name}#{number}", trajectory)
        for number, (at, trajectory) in enumerate(zip(times, played, strict=True))
    ]
    load = Online(arrivals, times[-1] + 1.5 * slo.ttft_s, 1 << 62 if misses is None else misses)
    return Scenario(cluster, system, load, turn, seed, slo, origin=origin, **others)


@lru_cache(4)
def _set(source: Source, limit: int, seed: int) -> tuple[Played, Turn]:
    """What a source holds, and its mean turn."""
    played = source.load(limit, seed)
    mean = pooled(played.trajectories)
    return played, Turn(round(mean.hit), round(mean.miss), round(mean.generate))


def _played(
    cluster: Cluster, source: Source, count: int, turns: int | None, seed: int
) -> tuple[Sequence[Trajectory], Turn, str]:
    """count trajectories, or windows of them; the mean turn of the whole set; where they are from."""
    played, turn = _set(source, cluster.limit, seed)
    if turns is None:
        return Extended(played.trajectories, count, seed), turn, played.origin
    try:
        taken = windows(played.trajectories, count, turns, seed)
    except ValueError as error:
        raise ConfigError(f"{error}: take fewer agents or turns") from None
    return taken, turn, f"a window of {turns} turns at native context out of {played.origin}"
