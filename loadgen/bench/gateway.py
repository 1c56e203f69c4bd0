"""A storage gateway and a process that reads all blocks from it into its region, as a traffic manager does."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop

from common.children import Child, child_command, child_input, read_address
from common.cluster import with_control
from common.config import SecurityConfig
from common.errors import ConfigError
from common.faults import Faults
from common.messages import BlockResults, ReadBlocks
from common.metrics import Metrics
from common.rpc import Node
from common.rundir import RunDirectory
from common.transport.memory import Memory
from common.types import Role
from loadgen.bench.ours import open_kind
from loadgen.bench.pair import START_S, Pair, Process
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side
from loadgen.bench.stored import config, key, places

READ_S = 60.0
new_event_loop = uvloop.new_event_loop


@asynccontextmanager
async def active(layout: Layout, address: str) -> AsyncIterator[Side]:
    """address: JSON of the gateway's control endpoint and the kind of transport."""
    control, kind = json.loads(address)
    node = Node(f"bench.{secrets.token_hex(8)}", SecurityConfig(), Metrics(), Faults([], ""))
    async with open_kind(kind) as transport:
        memory = Memory.create("gateway", layout.region_bytes)
        memory.view[:] = bytes(memory.size)
        keys = b"".join(key(block) for block in range(layout.count))
        request = ReadBlocks("bench", keys, transport.register(memory), places(layout))

        async def read() -> None:
            answer: BlockResults = await node.link(control).call(request, READ_S)
            if not all(answer.ok):
                raise ConfigError(f"{answer.ok.count(False)} of {len(answer.ok)} blocks were not read")

        yield Side(move=read, memory=memory.view)
    await node.close()


@asynccontextmanager
async def open_gateway(layout: Layout, root: Path, kind: str, run: RunDirectory) -> AsyncIterator[Pair]:
    """A scheduler and a gateway over the block directory at root, as processes, and a reader."""
    async with AsyncExitStack() as ends:
        settings = config(root, kind)
        for role in (Role.SCHEDULER, Role.STORAGE_GATEWAY):
            with (run.path / f"{kind}-{role.value}.log").open("w") as log:
                child = Child(role.value, child_command(role, role.value), first_line=child_input(settings), log=log)
            ends.callback(child.kill)
            address = await read_address(child, START_S)
            if role is Role.SCHEDULER:
                settings = with_control(settings, address["control"])
        reader = await Process.start("gateway", "active")
        ends.push_async_callback(reader.end)
        await reader.introduce(layout, json.dumps([address["control"], kind]))
        pair = Pair(layout, reader, child.pid, reader)
        await pair.check()
        yield pair
