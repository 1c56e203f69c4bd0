"""A whole cluster on this host, as `dualpath up` and the demo run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.cluster import Process, Processes, with_control
from common.config import Config
from common.model import Manifest, read_configured_model, read_model_directory
from common.rundir import RunDirectory
from common.types import Role
from services.launcher.models import Model, cache_directory

if TYPE_CHECKING:
    from rich.progress import Progress


def with_model(config: Config, model: Model) -> Config:
    """The configuration of a cluster that serves this model. ConfigError if the model does not fit it."""
    update = {"path": str(model.path), "digest": model.digest, "name": config.model.name or model.name}
    section = config.model.model_copy(update=update)
    manifest = read_model_directory(model.path, section.dtype, section.block_size, model.digest).manifest
    return _with_blocks(config.model_copy(update={"model": section}), model.path.name, manifest)


def with_profile(config: Config) -> Config:
    """The configuration of a cluster that serves the profiled model which it names. ConfigError if there is none."""
    return _with_blocks(config, config.model.profile, read_configured_model(config).manifest)


def _with_blocks(config: Config, name: str, manifest: Manifest) -> Config:
    """Blocks go to the cache directory where storage.path is not set: one directory a manifest."""
    blocks = cache_directory() / "blocks" / f"{name}-{manifest.namespace.hex()[:16]}"
    storage = config.storage.model_copy(update={"path": config.storage.path or str(blocks)})
    return config.model_copy(update={"storage": storage})


class Cluster(Processes):
    """One scheduler, gateway and front end, and so many engines of each role; its start shows as a task of progress."""

    def __init__(
        self,
        config: Config,
        prefill: int,
        decode: int,
        run: RunDirectory,
        progress: Progress,
        title: str = "starting processes",
    ) -> None:
        roles = {
            "scheduler": Role.SCHEDULER,
            "storage-gateway": Role.STORAGE_GATEWAY,
            "frontend": Role.FRONTEND,
            **{f"prefill-{index}": Role.PREFILL for index in range(prefill)},
            **{f"decode-{index}": Role.DECODE for index in range(decode)},
        }
        task = progress.add_task(title, total=len(roles))
        processes = {name: Process(role, config) for name, role in roles.items()}
        super().__init__(processes, run, lambda: progress.advance(task))
        self._config = config

    @property
    def config(self) -> Config:
        """As given, with where the scheduler really listens."""
        return with_control(self._config, self.control)
