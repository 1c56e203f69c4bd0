"""A whole cluster on this host: started in order, watched, and ended so that nothing stays behind.

Life: scheduler -> everything else at once -> ready (counted) -> deaths are reported -> front end drained -> the rest
ended. Every process has a session, a lifeline and a log of its own (common.children).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.children import Child, child_command, child_input, end_all, read_address
from common.config import Config
from common.errors import ConfigError
from common.model import read_model_directory
from common.types import Role
from services.launcher.models import Model, cache_directory
from services.launcher.rundir import RunDirectory

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds beyond timeouts.drain_s that a process gets to close down before it is killed.
CLOSE_S = 5.0
LOG_TAIL_LINES = 12
#: The model is complete before a process sees it.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


T = TypeVar("T")


class ProcessError(ConfigError):
    """A process has ended that should not. The message is its own error line, or the end of its log."""


def with_model(config: Config, model: Model) -> Config:
    """The configuration of a cluster that serves this model. ConfigError if the model does not fit it.

    Blocks go to the cache directory where storage.path is not set: one directory a manifest.
    """
    update = {"path": str(model.path), "digest": model.digest, "name": config.model.name or model.name}
    section = config.model.model_copy(update=update)
    manifest = read_model_directory(model.path, section.dtype, section.block_size, model.digest).manifest
    blocks = cache_directory() / "blocks" / f"{model.path.name}-{manifest.namespace.hex()[:16]}"
    storage = config.storage.model_copy(update={"path": config.storage.path or str(blocks)})
    return config.model_copy(update={"model": section, "storage": storage})


class Cluster:
    """The processes of one cluster, as an async context: entering starts them all, leaving ends them all.

    ProcessError if one does not become ready; by then all are ended. Afterwards config.scheduler.control and url are
    where the scheduler and the front end really listen.
    """

    def __init__(
        self,
        config: Config,
        prefill: int,
        decode: int,
        run: RunDirectory,
        progress: Progress,
        title: str = "starting processes",
    ) -> None:
        self.config = config
        self.url = ""
        self._roles = {
            "storage-gateway": Role.STORAGE_GATEWAY,
            "frontend": Role.FRONTEND,
            **{f"prefill-{index}": Role.PREFILL for index in range(prefill)},
            **{f"decode-{index}": Role.DECODE for index in range(decode)},
        }
        self._run = run
        self._progress = progress
        self._title = title
        self._children: dict[str, Child] = {}
        self._deaths: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    @property
    def alive(self) -> bool:
        """Whether any process is left."""
        return any(child.alive for child in self._children.values())

    async def death(self) -> tuple[str, int]:
        """Wait for the next process to end by itself: its name and exit status."""
        return await self._deaths.get()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work, which needs every process. If one ends, work is cancelled and ProcessError says why."""
        working, death = asyncio.create_task(work), asyncio.create_task(self.death())
        try:
            await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                name, status = death.result()
                raise self._explained(name, f"{name} ended with status {status}")
            return working.result()
        finally:
            for task in (working, death):
                task.cancel()
            await asyncio.gather(working, death, return_exceptions=True)

    async def __aenter__(self) -> Cluster:
        task = self._progress.add_task(self._title, total=1 + len(self._roles))
        try:
            addresses = await self._start({"scheduler": Role.SCHEDULER}, task)
            scheduler = self.config.scheduler.model_copy(update={"control": addresses["scheduler"]["control"]})
            self.config = self.config.model_copy(update={"scheduler": scheduler})
            addresses = await self._start(self._roles, task)
            self.url = addresses["frontend"]["url"]
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """The front end finishes its requests while the rest is still there. Bounded; kills at once when cancelled, and
        when left by an exception: nobody waits for the answers any more."""
        grace = self.config.timeouts.drain_s + CLOSE_S
        try:
            if failure is not None:
                return
            await end_all([self._children["frontend"]], grace)
            await end_all(self._children.values(), grace)
        finally:
            self._kill()

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()

    async def _start(self, roles: dict[str, Role], task: TaskID) -> dict[str, dict[str, Any]]:
        """Start these processes at once; their addresses, by name, when all are ready."""
        for name, role in roles.items():
            self._children[name] = self._spawn(name, role)
        limit = self.config.timeouts.start_s
        starts = [asyncio.create_task(read_address(self._children[name], limit), name=name) for name in roles]
        death = asyncio.create_task(self.death())
        addresses: dict[str, dict[str, Any]] = {}
        waiting = set(starts)
        try:
            while waiting:
                done, _ = await asyncio.wait({*waiting, death}, return_when=asyncio.FIRST_COMPLETED)
                if death in done:
                    name, status = death.result()
                    raise self._explained(name, f"{name} ended with status {status}")
                for start in waiting & done:
                    try:
                        addresses[start.get_name()] = start.result()
                    except ConfigError as error:
                        raise self._explained(start.get_name(), str(error)) from None
                    self._progress.advance(task)
                waiting -= done
            return addresses
        finally:
            for pending in (*starts, death):
                pending.cancel()
            await asyncio.gather(*starts, death, return_exceptions=True)

    def _spawn(self, name: str, role: Role) -> Child:
        with self._log(name).open("w") as log:
            child = Child(
                name,
                child_command(role, name),
                first_line=child_input(self.config),
                log=log,
                environment=ENVIRONMENT,
                pass_fds=self._run.held,
            )
        child.exited.add_done_callback(lambda exited: self._deaths.put_nowait((name, exited.result())))
        return child

    def _log(self, name: str) -> Path:
        return self._run.path / f"{name}.log"

    def _explained(self, name: str, event: str) -> ProcessError:
        """Why a process has ended: the error line that it left, or else the end of its log, which is kept."""
        lines = self._log(name).read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("error: "):
                return ProcessError(f"{name}: {line.removeprefix('error: ')}")
        tail = "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])
        return ProcessError(f"{event}; the logs are in {self._run.keep()}; {self._log(name).name} ends with\n{tail}")
