"""A sender and a receiver in processes of their own (loadgen.bench.side), and what one move of all pieces takes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    sender_cpu_s: float
    receiver_cpu_s: float

    @property
    def gib_per_s(self) -> float:
        return self.num_bytes / GIB / self.seconds

    def cpu_per_gib(self) -> dict[str, float]:
        """CPU seconds a GiB, by side."""
        gib = self.num_bytes / GIB
        return {"sender": self.sender_cpu_s / gib, "receiver": self.receiver_cpu_s / gib}


class _Process:
    """One side, spoken to line by line. Whoever starts it must end() it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, module: str, role: str, python: str) -> _Process:
        command = [python, "-P", "-m", "loadgen.bench.side", module, role]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=child_environment(), limit=1 << 22
            )
        except OSError as error:
            raise ConfigError(f"{python} cannot be run: {error.strerror}") from None
        return cls(f"{module} {role}", process)

    async def ask(self, line: str, timeout: float) -> Any:
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

    async def _last_line(self) -> str:
        assert self._process.stderr is not None
        lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Pair:
    """Both processes, ready to move."""

    def __init__(self, layout: Layout, sender: _Process, receiver: _Process) -> None:
        self._layout = layout
        self._sender = sender
        self._receiver = receiver

    async def measure(self, moves: int) -> Measured:
        """So many moves, one after the other."""
        before = await self._cpu_s()
        seconds = [await self._sender.ask("move", MOVE_S) for _ in range(moves)]
        used = [after - then for after, then in zip(await self._cpu_s(), before, strict=True)]
        return Measured(moves * self._layout.region_bytes, sum(seconds), *used)

    async def check(self) -> None:
        """ConfigError unless the receiver holds every piece in its place."""
        expected = xxhash.xxh3_64_hexdigest(self._layout.expected().data)
        if await self._receiver.ask("digest", MOVE_S) != expected:
            raise ConfigError("what arrived is not what was sent")

    async def _cpu_s(self) -> list[float]:
        return [await process.ask("cpu", MOVE_S) for process in (self._sender, self._receiver)]


@asynccontextmanager
async def open_pair(module: str, layout: Layout, python: str = sys.executable) -> AsyncIterator[Pair]:
    """A pair of this module's sides under that interpreter. ConfigError if it cannot move anything."""
    processes: list[_Process] = []

    async def start(role: str, address: str) -> Any:
        process = await _Process.start(module, role, python)
        processes.append(process)
        return await process.ask(json.dumps({"layout": asdict(layout), "address": address}), START_S)

    try:
        address = await start("receiver", "")
        await start("sender", address)
        pair = Pair(layout, processes[1], processes[0])
        await pair.measure(1)
        await pair.check()
        yield pair
    finally:
        for process in processes:
            await process.end()
