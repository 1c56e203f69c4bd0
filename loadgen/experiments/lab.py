"""A cluster for one run of an experiment: a system of the table, on scaled nodes, over a store that is warm."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.blocks.hashing import prefix_keys
from common.cluster import Process, Processes
from common.config import Config, load_config
from common.errors import ConfigError
from common.model import ModelInfo, read_configured_model
from common.perf.scaling import Scaling
from common.rundir import RunDirectory
from common.storage.seed import link_directory, seed_directory
from common.types import Role
from common.watchdog import SLOW
from common.workload.hits import hits
from common.workload.text import IdText
from common.workload.trajectories import Trajectory
from loadgen.experiments.placement import CONTROL, STORE, Placement
from loadgen.systems import base_settings, system_settings


@dataclass(frozen=True, slots=True)
class Lab:
    """What all runs of an experiment share. hit, miss: tokens of the workload's mean turn."""

    scaling: Scaling
    prefill: int
    decode: int
    hit: int
    miss: int
    placement: Placement
    run: RunDirectory

    @property
    def nodes(self) -> dict[str, Role]:
        """The engines' nodes."""
        return {
            **{f"p{index}": Role.PREFILL for index in range(self.prefill)},
            **{f"d{index}": Role.DECODE for index in range(self.decode)},
        }

    def config(self, system: str, node: str, store: Path) -> Config:
        """Of the processes of one node. ConfigError."""
        settings: dict[str, Any] = {
            "scheduler.control": "tcp://127.0.0.1:*",
            "storage.path": str(store),
            **base_settings(self.scaling, self.hit, self.miss),
            **self.placement.place(node).settings,
            **system_settings(system, self.scaling, self.hit, self.miss),
        }
        return load_config(None, settings)

    def processes(self, system: str, store: Path) -> dict[str, Process]:
        """A whole cluster, by name."""
        nodes = {
            "scheduler": (Role.SCHEDULER, CONTROL),
            "frontend": (Role.FRONTEND, CONTROL),
            "storage-gateway": (Role.STORAGE_GATEWAY, STORE),
            **{node: (role, node) for node, role in self.nodes.items()},
        }
        return {
            name: Process(role, self.config(system, node, store), self.placement.place(node).prefix)
            for name, (role, node) in nodes.items()
        }

    def model(self) -> ModelInfo:
        return read_configured_model(self.config("basic", CONTROL, Path("/")))

    def logged(self) -> str:
        """The first and the last thing that a process of the last cluster had to say; they log what should not be. What
        the watchdog says of slow callbacks is a measure, not that."""
        for path in sorted(self.run.path.glob("*.log")):
            lines = path.read_text(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip() and SLOW not in line]
            if said:
                return f"{path.stem}: {' ... '.join(dict.fromkeys([said[0], said[-1]]))}"
        return ""

    @asynccontextmanager
    async def cluster(
        self, system: str, seeded: Path, ready: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Processes]:
        """A fresh cluster over a copy of the seeded store. ProcessError if it does not come up, ConfigError if there is
        no room for the copy."""
        store = self.run.path / f"{system}.blocks"
        try:
            with _storing(store):
                await asyncio.to_thread(link_directory, seeded, store)
            async with Processes(self.processes(system, store), self.run, ready) as cluster:
                yield cluster
        finally:
            await asyncio.to_thread(shutil.rmtree, store, ignore_errors=True)

    @asynccontextmanager
    async def seeded(self, trajectories: Sequence[Trajectory]) -> AsyncIterator[Path]:
        """A store that holds what these trajectories find there on their first turns; gone afterwards. One at a time.
        ConfigError if there is no room for it."""
        path = self.run.path / "seed"
        model = self.model()
        try:
            with _storing(path):
                await asyncio.to_thread(seed_directory, path, model.manifest, first_hits(trajectories, model))
            yield path
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot make the blocks of a run in {path}: {error.strerror}: make room there (bytes and inodes), or play "
            "fewer windows or turns"
        ) from None


def first_hits(trajectories: Sequence[Trajectory], model: ModelInfo) -> Iterator[bytes]:
    """The keys of the blocks that the first turn of each trajectory hits."""
    text = IdText(model.vocab_size)
    block = model.manifest.geometry.block_size
    for trajectory in trajectories:
        packed = text.tokens(trajectory.name, 0, hits(trajectory, block)[0]).tobytes()
        yield prefix_keys(model.manifest.namespace, packed, block)
