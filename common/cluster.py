"""The processes of one cluster as children of this one: started in order, watched, ended so that nothing stays behind.

Life: scheduler -> everything else at once -> ready (counted) -> deaths are reported -> front end drained -> the rest
ended. Every process has a session, a lifeline and a log of its own (common.children).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from common.children import Child, child_command, child_input, end_all, read_address
from common.config import Config
from common.errors import ConfigError
from common.rundir import RunDirectory
from common.types import Role

#: Seconds beyond timeouts.drain_s that a process gets to close down before it is killed.
CLOSE_S = 5.0
LOG_TAIL_LINES = 12
#: A model is complete before a process sees it.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SCHEDULER, FRONTEND = "scheduler", "frontend"

T = TypeVar("T")


class ProcessError(ConfigError):
    """A process has ended that should not. The message is its own error line, or the end of its log."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its configuration, and what stands before its command (to put it in a network namespace, say)."""

    role: Role
    config: Config
    prefix: tuple[str, ...] = ()


def with_control(config: Config, control: str) -> Config:
    """The configuration with the scheduler at this endpoint."""
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"control": control})})


class Processes:
    """A cluster, as an async context: entering starts all of it, leaving ends all of it.

    processes: by name, with a "scheduler" and a "frontend". ready is called each time that another one is ready.
    ProcessError if one does not become so; by then all are ended. From then on control and url are where the scheduler
    and the front end really listen.
    """

    def __init__(
        self, processes: Mapping[str, Process], run: RunDirectory, ready: Callable[[], None] = lambda: None
    ) -> None:
        self.control = ""
        self.url = ""
        self._processes = dict(processes)
        self._run = run
        self._ready = ready
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

    async def __aenter__(self) -> Self:
        try:
            addresses = await self._start({SCHEDULER})
            self.control = addresses[SCHEDULER]["control"]
            addresses = await self._start(self._processes.keys() - {SCHEDULER})
            self.url = addresses[FRONTEND]["url"]
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """The front end finishes its requests while the rest is still there. Bounded; kills at once when cancelled, and
        when left by an exception: nobody waits for the answers any more."""
        grace = self._processes[FRONTEND].config.timeouts.drain_s + CLOSE_S
        try:
            if failure is not None:
                return
            await end_all([self._children[FRONTEND]], grace)
            await end_all(self._children.values(), grace)
        finally:
            self._kill()

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()

    async def _start(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Start these processes at once; their addresses, by name, when all are ready."""
        starts: list[asyncio.Task[dict[str, Any]]] = []
        for name in names:
            child = self._children[name] = self._spawn(name, self._processes[name])
            limit = self._processes[name].config.timeouts.start_s
            starts.append(asyncio.create_task(read_address(child, limit), name=name))
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
                    self._ready()
                waiting -= done
            return addresses
        finally:
            for pending in (*starts, death):
                pending.cancel()
            await asyncio.gather(*starts, death, return_exceptions=True)

    def _spawn(self, name: str, process: Process) -> Child:
        config = with_control(process.config, self.control) if self.control else process.config
        with self._log(name).open("w") as log:
            child = Child(
                name,
                [*process.prefix, *child_command(process.role, name)],
                first_line=child_input(config),
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
