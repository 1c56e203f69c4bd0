"""One process of a comparison: python -m loadgen.bench.side MODULE ROLE, where MODULE of this package knows how.

Its first line of input is the layout, and the receiver's address where it sends; its first answer is its own
address. Then each line is a command: "move" (a sender: every piece, until the receiver has
all of it) with the wall time, "cpu" with the CPU time that the process has used so far, "digest" (a receiver) with the
digest of what it holds. It ends with its input. Answers are lines of JSON after ANSWER: some libraries print, too.

A module has sender(layout, address) and receiver(layout): asynchronous contexts that give a Side.
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
    """address: where the other side finds this one. move: a sender's; memory: a receiver's."""

    address: str = ""
    move: Callable[[], Awaitable[None]] | None = None
    memory: memoryview | None = None


class Module(Protocol):
    def sender(self, layout: Layout, address: str) -> AbstractAsyncContextManager[Side]: ...

    def receiver(self, layout: Layout) -> AbstractAsyncContextManager[Side]: ...


async def _commands() -> AsyncIterator[str]:
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        yield line


async def _answer(side: Side, command: str) -> Any:
    if command == "move":
        assert side.move is not None, "a sender's command"
        begun = time.perf_counter()
        await side.move()
        return time.perf_counter() - begun
    if command == "digest":
        assert side.memory is not None, "a receiver's command"
        return xxhash.xxh3_64_hexdigest(side.memory)
    return time.process_time()


def _say(answer: Any) -> None:
    print(ANSWER + json.dumps(answer), flush=True)


async def main(module: Module, role: str) -> None:
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    layout = Layout(**first["layout"])
    opened = module.sender(layout, first["address"]) if role == "sender" else module.receiver(layout)
    async with opened as side:
        _say(side.address)
        async for command in _commands():
            _say(await _answer(side, command))


if __name__ == "__main__":
    chosen: Any = importlib.import_module(f"loadgen.bench.{sys.argv[1]}")
    with asyncio.Runner(loop_factory=getattr(chosen, "new_event_loop", None)) as runner:
        runner.run(main(chosen, sys.argv[2]))
