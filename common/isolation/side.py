"""One process of a measurement: python -m common.isolation.side. What it does is in its first line of input, a Task.

target   registers memory and says how it can be written (a RegionDescriptor in hex), then receives
bulk     writes there as much as goes through, on several connections; says "ready" once queues have filled
ping     writes a few bytes there now and then; says how long each write took, microseconds, and ends
awake    keeps a CPU from falling asleep, at idle priority: an idle virtual CPU is late for what wakes it
It says so in lines of JSON, an {"error": ...} among them, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import uvloop

from common.config import NetworkConfig
from common.errors import ConfigError
from common.faults import Faults
from common.log import setup_logging
from common.metrics import Metrics
from common.transport.base import Batch, Intent, TransferError, Transport, make_runs
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.wire import decode, encode

PING_BYTES = 64
#: The mean pause between pings: at random, lest they keep step with anything.
PING_PAUSE_S = 0.001
#: Not counted: the connection is set up, caches are warm.
WARM_UP_PINGS = 20
#: Bytes of one write of bulk, and writes in flight on one connection.
BULK_BYTES, BULK_IN_FLIGHT = 1 << 20, 4
#: Until the queues of a bulk transfer have filled.
SETTLE_S = 0.7
#: A write that takes longer fails: queues of the network are far shorter.
TRANSFER_S = 10.0
#: Of a process that gives way; positive, so that anybody may.
NICE = 10
#: Of one ping process at most, so that its answer fits in a line.
MAX_PINGS = 50_000


class Role(StrEnum):
    TARGET = "target"
    BULK = "bulk"
    PING = "ping"
    AWAKE = "awake"


@dataclass(frozen=True, slots=True)
class Task:
    """host: the interface, address or RDMA device. target: RegionDescriptor in hex; intent: whose class the bytes ride;
    seconds: for how long a ping process measures; flows: connections of a bulk process. gives_way: to others that want
    a CPU, because it is the network that is measured."""

    role: Role
    host: str = ""
    network: dict[str, Any] | None = None
    target: str = ""
    intent: Intent = Intent.MODEL_COLLECTIVE
    seconds: float = 1.0
    flows: int = 1
    gives_way: bool = False

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_task(line: str) -> Task:
    told = json.loads(line)
    return Task(**{**told, "role": Role(told["role"]), "intent": Intent(told["intent"])})


@contextlib.asynccontextmanager
async def _transport(task: Task) -> AsyncIterator[Transport]:
    network = NetworkConfig.model_validate(task.network)
    transport = open_transport(network, task.host, Metrics(), Faults([], ""), TRANSFER_S)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def receive(task: Task) -> None:
    async with _transport(task) as transport:
        memory = Memory.create("isolation", BULK_BYTES)
        # never by shared memory: it is the network that is measured, also between processes of one host
        _say(encode(replace(transport.register(memory), shm="")).hex())
        await asyncio.Event().wait()


async def load(task: Task) -> None:
    async with contextlib.AsyncExitStack() as ends:
        writers = []
        for _ in range(task.flows):  # a transport each, because one has one connection to a target
            transport = await ends.enter_async_context(_transport(task))
            writers += [asyncio.create_task(_write_on(transport, task)) for _ in range(BULK_IN_FLIGHT)]
        done, _ = await asyncio.wait(writers, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            _say("ready")
            done, _ = await asyncio.wait(writers, return_when=asyncio.FIRST_COMPLETED)
        for writer in done:
            writer.result()


async def _write_on(transport: Transport, task: Task) -> None:
    source = Memory.create("isolation", BULK_BYTES)
    batch = Batch(transport.register(source), _target(task), make_runs(0, 0, BULK_BYTES))
    while True:
        await transport.write(batch, task.intent)


async def ping(task: Task) -> None:
    chance = random.Random(0)
    round_trips: list[float] = []
    async with _transport(task) as transport:
        source = Memory.create("isolation", PING_BYTES)
        batch = Batch(transport.register(source), _target(task), make_runs(0, 0, PING_BYTES))
        for _ in range(WARM_UP_PINGS):
            await transport.write(batch, task.intent)
        until = time.perf_counter() + task.seconds
        while (begun := time.perf_counter()) < until and len(round_trips) < MAX_PINGS:
            await transport.write(batch, task.intent)
            round_trips.append(round((time.perf_counter() - begun) * 1e6, 1))
            await asyncio.sleep(PING_PAUSE_S * chance.uniform(0.5, 1.5))
    _say(round_trips)


def _target(task: Task) -> RegionDescriptor:
    target: RegionDescriptor = decode(bytes.fromhex(task.target))
    return target


def _go_first() -> None:
    """Small messages wait for the network alone, not for a CPU, where this user may have that: a NIC does in hardware
    what these processes do."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def stay_awake() -> None:
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _say("ready")
    while True:
        pass


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    task = read_task(sys.stdin.readline())
    threading.Thread(target=_end_with_input, name="lifeline", daemon=True).start()
    if task.gives_way:
        os.nice(NICE)
    elif task.role is not Role.AWAKE:
        _go_first()
    if task.role is Role.AWAKE:
        stay_awake()
    setup_logging("warning", "console")  # to stderr: stdout is for answers
    work = {Role.TARGET: receive, Role.BULK: load, Role.PING: ping}[task.role]
    try:
        uvloop.run(work(task))
    except (ConfigError, TransferError) as error:
        _say({"error": str(error)})


if __name__ == "__main__":
    main()
