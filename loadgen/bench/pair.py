"""The two processes of one way (loadgen.bench.side), and what one move of all pieces takes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from common.children import child_environment
from common.errors import ConfigError
from loadgen.bench.pieces import Layout
from loadgen.bench.side import ANSWER

#: For a process to start, and for one move.
START_S, MOVE_S = 60.0, 120.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one way: bytes moved, wall seconds, CPU seconds of both processes."""

    num_bytes: int
    seconds: float
    active_cpu_s: float
    passive_cpu_s: float

    @property
    def gib_per_s(self) -> float:
        return self.num_bytes / GIB / self.seconds

    def cpu_per_gib(self) -> tuple[float, float]:
        """CPU seconds a GiB: of the active side, and of the passive one."""
        gib = self.num_bytes / GIB
        return self.active_cpu_s / gib, self.passive_cpu_s / gib


class Process:
    """One side, spoken to line by line. Whoever starts it must end() it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, module: str, role: str, python: str = sys.executable) -> Process:
        """ConfigError if there is no such interpreter."""
        command = [python, "-P", "-m", "loadgen.bench.side", module, role]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=child_environment(), limit=1 << 22
            )
        except OSError as error:
            raise ConfigError(f"{python} cannot be run: {error.strerror}") from None
        return cls(f"{module}, {role} side", process)

    async def introduce(self, layout: Layout, given: str) -> str:
        """Tell it what it is for; its address."""
        address: str = await self.ask(json.dumps({"layout": asdict(layout), "given": given}), START_S)
        return address

    async def ask(self, line: str, timeout: float = MOVE_S) -> Any:
        """Its answer. ConfigError, with the last thing that it said, if it ends or is late."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        try:
            async with asyncio.timeout(timeout):
                while answer := (await self._process.stdout.readline()).decode(errors="replace"):
                    if answer.startswith(ANSWER):
                        return json.loads(answer.removeprefix(ANSWER))
        except (TimeoutError, ConnectionError) as error:
            raise ConfigError(f"{self._name}: {type(error).__name__}") from None
        raise ConfigError(f"{self._name} ended: {await self._last_line()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def hold(self) -> None:
        """Let it do nothing."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGSTOP)

    def let_go(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)

    async def _last_line(self) -> str:
        assert self._process.stderr is not None
        lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (raised or lines)[-1] if lines else "without a word"

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Pair:
    """Both processes, ready to move. holder: the one with the target region; passive: a process id. still: processes
    that are held while they are not measured, for some poll when there is nothing to do, at the cost of the others."""

    def __init__(
        self, layout: Layout, active: Process, passive: int, holder: Process, still: Sequence[Process] = ()
    ) -> None:
        self._layout = layout
        self._active = active
        self._passive = passive
        self._holder = holder
        self._still = still

    async def measure(self) -> Measured:
        """One move, after one that wakes both up."""
        with self._awake():
            await self._active.ask("move")
            before = self._cpu_s()
            seconds = await self._active.ask("move")
            used = [after - then for after, then in zip(self._cpu_s(), before, strict=True)]
        return Measured(self._layout.region_bytes, seconds, *used)

    async def check(self) -> None:
        """ConfigError unless every piece is in its place."""
        with self._awake():
            await self._active.ask("move")
            digest = await self._holder.ask("digest")
        if digest != xxhash.xxh3_64_hexdigest(self._layout.expected().data):
            raise ConfigError("what arrived is not what was sent")

    @contextmanager
    def _awake(self) -> Iterator[None]:
        for process in self._still:
            process.let_go()
        try:
            yield
        finally:
            for process in self._still:
                process.hold()

    def _cpu_s(self) -> tuple[float, float]:
        return process_cpu_s(self._active.pid), process_cpu_s(self._passive)


@asynccontextmanager
async def open_pair(
    module: str, layout: Layout, python: str = sys.executable, given: str = "", pulls: bool = False
) -> AsyncIterator[Pair]:
    """A pair of this module's sides under that interpreter, checked. given: to the passive side. pulls: the active side
    is the one into which everything goes. ConfigError if it cannot move anything."""
    async with AsyncExitStack() as ends:
        passive = await Process.start(module, "passive", python)
        ends.push_async_callback(passive.end)
        active = await Process.start(module, "active", python)
        ends.push_async_callback(active.end)
        await active.introduce(layout, await passive.introduce(layout, given))
        pair = Pair(layout, active, passive.pid, active if pulls else passive, (active, passive))
        await pair.check()
        yield pair


def process_cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, all its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock id of another process's CPU clock, see clock_getcpuclockid(3)
