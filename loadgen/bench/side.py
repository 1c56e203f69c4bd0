"""One process of a comparison: python -m loadgen.bench.side MODULE ROLE, where MODULE of this package knows how.

The active side begins every move, and its clock counts; the passive one only has to be there. Its first line of input
is the layout and what it has to know, its first answer what the active side has to know of it. Then each line is a
command: "move" (active: every piece, until all of it is in place) with the wall time, "digest" with the digest of the
region into which it all goes, from the side that has it. It ends with its input. Answers are lines of JSON after
ANSWER: some libraries print, too.

A module has active(layout, address) and passive(layout, given): asynchronous contexts that give a Side.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from loadgen.bench.pieces import Layout

ANSWER = "answer: "


@dataclass(frozen=True, slots=True)
class Side:
    """address: what the active side has to know of a passive one. move: an active side's. memory: the target region."""

    address: str = ""
    move: Callable[[], Awaitable[None]] | None = None
    memory: memoryview | None = None


class Module(Protocol):
    def active(self, layout: Layout, address: str) -> AbstractAsyncContextManager[Side]: ...

    def passive(self, layout: Layout, given: str) -> AbstractAsyncContextManager[Side]: ...


async def _commands() -> AsyncIterator[str]:
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        yield line


async def _answer(side: Side, command: str) -> Any:
    if command == "move":
        assert side.move is not None, "the active side's"
        begun = time.perf_counter()
        await side.move()
        return time.perf_counter() - begun
    assert side.memory is not None, "asked of the other side"
    return xxhash.xxh3_64_hexdigest(side.memory)


def _say(answer: Any) -> None:
    print(ANSWER + json.dumps(answer), flush=True)


async def main(module: Module, role: str) -> None:
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    layout = Layout(**first["layout"])
    opened = module.active if role == "active" else module.passive
    async with opened(layout, first["given"]) as side:
        _say(side.address)
        async for command in _commands():
            _say(await _answer(side, command))


if __name__ == "__main__":
    chosen: Any = importlib.import_module(f"loadgen.bench.{sys.argv[1]}")
    with asyncio.Runner(loop_factory=getattr(chosen, "new_event_loop", None)) as runner:
        runner.run(main(chosen, sys.argv[2]))
