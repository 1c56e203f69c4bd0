"""What an experiment is made of: a scaled cluster, a workload of windows, and runs of systems on it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import zmq

from common.errors import ConfigError
from common.perf.bounds import Plan, Turn
from common.perf.hardware import get_hardware
from common.perf.models import get_model_profile
from common.perf.scaling import Scaling
from common.rundir import RunDirectory
from common.workload.hits import BLOCK_TOKENS, Pooled, pooled
from common.workload.trajectories import Trajectory
from common.workload.windows import beginnings, window, windows
from loadgen.experiments.lab import Lab
from loadgen.experiments.placement import Placement
from loadgen.systems import BOUND_AS
from loadgen.workload.source import Played, Source

#: Where a store is memory, not a disk.
MEMORY_DIRECTORY = Path("/dev/shm")
#: Of a block: a header and a share of its directory; what a run stores is more, but far fewer blocks.
STORED_BYTES = 3 * 4096
#: A turn costs about a quarter of a second of CPU time, most of it the storage gateway's, front end's and scheduler's.
EASY_TURNS_PER_S = 4.0
#: What a result says of the windows (their choice is in common.workload.windows).
_TIMES = (
    "{pauses}; a job's completion time is its turns over the rate at which turns ended while all agents were active:"
    " the last agents of a short job do not stand for a long one's; the makespan is given too"
)
WINDOWS = (
    "each trajectory is a window of {turns} turns at native context out of {origin}; its prefix is in storage"
    " beforehand; " + _TIMES
)
BEGINNINGS = "each trajectory is the first {turns} turns of {origin}; " + _TIMES


@dataclass(frozen=True)
class Setting:
    """Everything that two runs to be compared have in common.

    prefill, decode: nodes. turns: of each window of the workload. from_start: windows are trajectories' first turns.
    """

    model: str = "ds-660b"
    hardware: str = "h800"
    prefill: int = 2
    decode: int = 4
    gpus: int = 1
    time_factor: float = 4.0
    workload: Source = field(default_factory=Source)
    turns: int = 4
    know_hits: bool = True
    seed: int = 0
    from_start: bool = False

    @cached_property
    def scaling(self) -> Scaling:
        """ConfigError for a model or hardware that is not known."""
        return Scaling(get_model_profile(self.model), get_hardware(self.hardware), self.gpus, self.time_factor)

    @cached_property
    def played(self) -> Played:
        """Of which windows are taken. ConfigError for a workload that is none."""
        return self.workload.load(self.limit, self.seed)

    @property
    def limit(self) -> int:
        """Of a context, in tokens: the model's, or what every system can hold; Basic needs all layers in a prefill
        engine's device memory."""
        scaling = self.scaling
        memory = min(scaling.prefill_memory, scaling.decode_memory, scaling.buffer)
        held = memory // scaling.geometry(BLOCK_TOKENS).full_block_bytes * BLOCK_TOKENS
        return min(scaling.model.max_context_tokens, held)

    @property
    def max_length(self) -> int:
        """Of an agent, in tokens (the paper's MAL)."""
        return self.workload.max_length(self.limit)

    @cached_property
    def mean_turn(self) -> Pooled:
        return pooled(self.played.trajectories)

    def windows(self, count: int, seed: int) -> tuple[Trajectory, ...]:
        """The same ones for the same arguments. ConfigError if there are not so many."""
        try:
            take = beginnings if self.from_start else windows
            return tuple(take(self.played.trajectories, count, self.turns, self.seed + seed))
        except ValueError as error:
            raise ConfigError(f"{error}: take fewer agents or turns") from None

    @cached_property
    def plan(self) -> Plan:
        """The planner's formula for this cluster and workload."""
        mean = self.mean_turn
        if self.from_start:
            first = [window(whole, 0, min(self.turns, len(whole.turns))) for whole in self.played.trajectories]
            mean = pooled(first)
        turn = Turn(round(mean.hit), round(mean.miss), round(mean.generate))
        return Plan(self.scaling.model, self.scaling.hardware, self.prefill, self.decode, turn, self.gpus)

    def blocks(self, windows: float) -> int:
        """Of a store from which that many windows have been played."""
        return round(windows * (self.mean_turn.hit / BLOCK_TOKENS + self.turns))

    @property
    def easy_time_factor(self) -> float:
        """With which two cores can follow: they run about EASY_TURNS_PER_S turns of a cluster that reads on both
        sides."""
        return max(1.0, float(math.ceil(self.plan.bound("dualpath").turns_per_s / EASY_TURNS_PER_S)))

    def lab(self, placement: Placement, directory: RunDirectory) -> Lab:
        mean = self.mean_turn
        return Lab(self.scaling, self.prefill, self.decode, round(mean.hit), round(mean.miss), placement, directory)

    @property
    def nodes(self) -> str:
        return f"{self.prefill}P{self.decode}D"

    def place(self) -> dict[str, Any]:
        """What a run says of where it belongs in a sweep."""
        return {
            "model": self.model,
            "nodes": self.nodes,
            "mal": self.max_length,
            "append_scale": self.workload.append_scale,
            "generation_scale": self.workload.generation_scale,
        }

    def describe(self, placement: str) -> dict[str, Any]:
        """For the head of a result."""
        return {
            "config": asdict(self),
            "seed": self.seed,
            "mean_turn": asdict(self.mean_turn),
            "workload": (BEGINNINGS if self.from_start else WINDOWS).format(
                turns=self.turns, origin=self.played.origin, pauses=self.played.pauses
            ),
            "played": self.played.describe(),
            "hits": "given by the client" if self.know_hits else "looked up in the store",
            "scaling": self.scaling.describe(),
            "scale": f"{self.scaling.describe()['statement']}; NICs are {placement}",
            "thresholds": asdict(self.scaling.thresholds(round(self.mean_turn.hit), round(self.mean_turn.miss))),
            "versions": versions(),
        }

    def bounds(self, agents: int, count: int) -> dict[str, Any]:
        """What the formula says of a job of count windows, agents of them at a time."""
        return self.plan.describe(agents, max(round(count * self.turns / agents), 1))

    def bound_ratio(self, slower: str, faster: str, agents: int, count: int) -> float:
        """Job completion time of one system over another's, by the formula alone."""
        turns = max(round(count * self.turns / agents), 1)
        of, to = (self.plan.job_completion_s(BOUND_AS[name], agents, turns) for name in (slower, faster))
        return of / to


def versions() -> dict[str, str]:
    """Of what could change a number."""
    return {
        "dualpath": _own_version(),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "kernel": platform.release(),
        "cores": str(len(os.sched_getaffinity(0))),
    }


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dualpath")
    except PackageNotFoundError:
        return "not installed"


def store_directory(blocks: int) -> Path | None:
    """Where to keep a store of so many blocks: in memory where it fits there well, else (None) with temporary files."""
    try:
        status = os.statvfs(MEMORY_DIRECTORY)
    except OSError:
        return None
    return MEMORY_DIRECTORY if status.f_bavail * status.f_frsize > 2 * blocks * STORED_BYTES else None


def interleaved(systems: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, system) in the order of running: each round has every system once, every other one in reverse: a machine
    that slows down or warms up favours nobody."""
    order: list[tuple[int, str]] = []
    for index in range(rounds):
        order += [(index, system) for system in (systems if index % 2 == 0 else reversed(systems))]
    return order
