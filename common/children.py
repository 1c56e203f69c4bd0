"""Child processes that end with their parent.

A child's stdin carries what it is given at start and is then its lifeline: when it closes, the child ends, so that
nobody outlives a parent that is killed. Its stdout carries lines back (an address, progress, a result); stderr is its
log. Each child of a launcher leads a session of its own: a Ctrl-C at the terminal reaches the launcher alone, and the
child can be ended together with everything that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from common.config import Config, dump_config
from common.errors import ConfigError
from common.types import Role

MAX_LINE_BYTES = 1 << 20


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this installation, whatever lies in the current directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_command(role: Role, name: str) -> list[str]:
    """The command of one process of a cluster; its configuration (child_input) goes to its stdin."""
    return python_module("services.serve", role.value, "--name", name, "--child")


def child_input(config: Config) -> str:
    return dump_config(config) + "\n"


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds the modules of this installation."""
    root = str(Path(__file__).parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


class Child:
    """One running child. Owned by whoever started it, who must call kill() in the end; it may be dead already by then.

    Use from a running event loop. exited holds its exit status once it has ended (negative: the signal that ended it).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        first_line: str = "",
        log: IO[str] | int | None = None,
        environment: dict[str, str] | None = None,
        session: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**child_environment(), **(environment or {})},
            start_new_session=session,
            pass_fds=pass_fds,
        )
        self._leads_session = session
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._pidfd = os.pidfd_open(self._process.pid)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: ended() tells
            self._process.stdin.write(first_line.encode())
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    async def ended(self) -> int:
        """Wait for its exit status."""
        return await asyncio.shield(self.exited)

    async def readline(self) -> str | None:
        """The next line of its standard output, without the line end; None when there will be no more."""
        if self._reader is None:
            loop = asyncio.get_running_loop()
            self._reader = reader = asyncio.StreamReader(MAX_LINE_BYTES)
            self._transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
            )
        line = await self._reader.readline()
        return line.decode().removesuffix("\n") if line else None

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); what it has started is its own to end."""
        if self.alive:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, with everything that it has started, and close the pipes to it. Idempotent."""
        if self.alive:
            self._reap()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._transport is not None:
            self._transport.close()
        else:
            self._process.stdout.close()

    def _reap(self) -> None:
        """Called when it has ended, or to end it. The group goes before the leader is waited for: until then its number
        cannot belong to anybody else."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._leads_session:
            # no such group: a Ctrl-C at the terminal ended it between its fork and its own session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self.exited.set_result(self._process.wait())


async def read_address(child: Child, timeout: float) -> dict[str, Any]:
    """What a process of a cluster says of itself once it is ready (common.process.service_address). ConfigError if it
    ends before, or is not ready in time."""
    try:
        async with asyncio.timeout(timeout):
            line = await child.readline()
    except TimeoutError:
        raise ConfigError(f"{child.name} was not ready within {timeout:g} s") from None
    if line is None:
        raise ConfigError(f"{child.name} ended with status {await child.ended()} before it was ready")
    address: dict[str, Any] = json.loads(line)
    return address


async def end_all(children: Iterable[Child], grace: float) -> None:
    """Ask every child to end, wait up to grace seconds, kill the rest. When cancelled, kills at once."""
    children = list(children)
    try:
        for child in children:
            child.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await asyncio.gather(*(child.ended() for child in children))
    finally:
        for child in children:
            child.kill()
