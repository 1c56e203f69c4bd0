"""What RDMA costs in Python, and whether it is as fast as the device: python -m loadgen.bench.verbs OWN PEER.

OWN and PEER are two RDMA interfaces of this host that reach one another (addresses, or devices). Printed, and written
with --out as JSON with a flat map "ratios":

- Python time per work request outside ibv_post_send, in steady state, lists of 64: cutting transfers into lists, aiming
  and posting these, taking their completions; less what reading the clock costs. Beside it the same writes built,
  posted and waited for one by one. A software device transmits inside the post, so the post says nothing of a NIC; it
  is printed apart.
- Throughput against ib_write_bw (perftest) between the same devices, where it is installed: wall time of more messages
  less that of fewer, so that neither its start nor its clock counts. In turns. It polls, which takes CPU time from a
  software device on few cores.

The passive side is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from common.config import NetworkConfig
from common.errors import ConfigError
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, Transport
from common.transport.memory import Memory
from common.transport.select import open_transport
from common.transport.verbs.constants import constants
from common.transport.verbs.device import Device
from common.transport.verbs.queue_pair import QueuePair
from common.transport.verbs.work import LIST_WRITES
from common.transport.verbs.writer import Connection
from common.wire import decode, encode
from loadgen.bench.pair import Process
from loadgen.bench.pieces import Layout
from loadgen.bench.side import Side

new_event_loop = uvloop.new_event_loop
TRANSFER_S = 60.0
#: Of the cost: short writes, so that a software device is soon done with them, but too long to travel inline.
COST = Layout(1024, 8 * LIST_WRITES)
COST_ROUNDS = 100
#: Of the throughput: pieces of the default size of ib_write_bw.
SPEED = Layout(64 << 10, 8 * LIST_WRITES)
SPEED_ROUNDS, SPEED_TRANSFERS = 10, 4
#: Messages of the two runs of ib_write_bw that are set off against one another.
FEW, MANY = 200, 2200
#: Half seconds in which its server has to be there.
SERVER_TRIES = 40


@asynccontextmanager
async def _transport(nic: str) -> AsyncIterator[Transport]:
    transport = open_transport(NetworkConfig(transport="verbs"), nic, Metrics(), Faults([], ""), TRANSFER_S)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def passive(layout: Layout, given: str) -> AsyncIterator[Side]:
    """given: its interface."""
    async with _transport(given) as transport:
        memory = Memory.create("bench", layout.region_bytes)
        memory.view[:] = bytes(memory.size)
        yield Side(address=encode(transport.register(memory)).hex(), memory=memory.view)


@asynccontextmanager
async def _batch(layout: Layout, own: str, peer: str) -> AsyncIterator[tuple[Transport, Batch]]:
    """A batch of the layout to a passive side of its own."""
    process = await Process.start("verbs", "passive")
    try:
        address = await process.introduce(layout, peer)
        async with _transport(own) as transport:
            memory = Memory.create("bench", layout.region_bytes)
            memory.view[:] = layout.content().data
            yield transport, Batch(transport.register(memory), decode(bytes.fromhex(address)), layout.runs())
    finally:
        await process.end()


def clock_s() -> float:
    """What reading the clock costs: under some kernels more than what is measured."""
    return min(-(time.perf_counter() - time.perf_counter()) for _ in range(1000))


def undisturbed(times: Sequence[float]) -> float:
    """Their 5th percentile: whatever else the machine does can only add, but for a guest's clock that stands still."""
    return sorted(times)[len(times) // 20]


class Stopwatch:
    """Time spent in functions, the outermost call of any of them, and how many calls that were."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def watch(self, owner: Any, name: str) -> None:
        """From now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begun
                    self.calls += 1

        setattr(owner, name, watched)


async def cost_of_lists(own: str, peer: str) -> tuple[float, float]:
    """Seconds per work request: in Python outside the post, and in the post."""
    python, posts = Stopwatch(), Stopwatch()
    for owner, name in ((Connection, "add"), (Connection, "_pump_on"), (QueuePair, "_on_event")):
        python.watch(owner, name)
    posts.watch(QueuePair, "post")
    rounds, clock = [], clock_s()
    async with _batch(COST, own, peer) as (transport, batch):
        for _ in range(COST_ROUNDS):
            python.reset()
            posts.reset()
            await transport.write(batch, Intent.KV_LOAD)
            # of the two readings of a stopwatch about one is in its time, the other in that of the one around it
            posted = posts.seconds - clock * posts.calls
            watched = python.seconds - clock * (python.calls + 2 * posts.calls)
            rounds.append((watched - posted, posted))
    outside, post = (undisturbed(times) / COST.count for times in zip(*rounds, strict=True))
    return outside, post


async def cost_one_by_one(own: str, peer: str) -> float:
    """Seconds per write in Python outside the post, when each is built anew, posted with its own doorbell and waited
    for: by the same queue pair, of which nothing else makes use meanwhile."""
    async with _batch(Layout(COST.size, LIST_WRITES), own, peer) as (transport, batch):
        await transport.write(batch, Intent.KV_LOAD)
        mover = transport._remote[0]  # type: ignore[attr-defined]
        ((_, connection),) = mover._connections.items()
        source, target = mover._registrations[batch.source.key], connection._grants[batch.target.key]
        connection._loop.remove_reader(connection._pair._fd)
        writes = (batch.runs + np.array([source.address, target.address, 0])).tolist()
        rounds = [_one_by_one(connection._pair, writes, source.lkey, target.rkey) for _ in range(COST_ROUNDS)]
    return undisturbed(rounds) / LIST_WRITES


def _one_by_one(pair: QueuePair, writes: list[list[int]], lkey: int, rkey: int) -> float:
    """Seconds in Python outside the posts and the waits, which are the device's."""
    from pyverbs.wr import SGE, SendWR

    verbs = constants()
    device_s, begun = 0.0, time.perf_counter()
    for source, target, length in writes:
        element = SGE(source, length, lkey)
        request = SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[element], send_flags=verbs.IBV_SEND_SIGNALED)
        request.set_wr_rdma(rkey, target)
        before = time.perf_counter()
        pair._pair.post_send(request)
        while not pair._queue.poll(1)[0]:
            time.sleep(0)
        device_s += time.perf_counter() - before
        request.close()
    return time.perf_counter() - begun - device_s - clock_s() * len(writes)


async def throughput(own: str, peer: str) -> dict[str, float]:
    """Bytes a second of this transport and of ib_write_bw (where it is installed), over all rounds, in turns."""
    ours, few, many = [], [], []
    devices = [await asyncio.to_thread(_device, nic) for nic in (own, peer)]
    async with _batch(SPEED, own, peer) as (transport, batch):
        await transport.write(batch, Intent.KV_LOAD)
        for _ in range(SPEED_ROUNDS):
            begun = time.perf_counter()
            await asyncio.gather(*(_done(transport, batch) for _ in range(SPEED_TRANSFERS)))
            ours.append(time.perf_counter() - begun)
            if shutil.which("ib_write_bw"):
                few.append(await asyncio.to_thread(_ib_write_bw, devices, FEW))
                many.append(await asyncio.to_thread(_ib_write_bw, devices, MANY))
    rates = {"verbs": SPEED_ROUNDS * SPEED_TRANSFERS * SPEED.region_bytes / sum(ours)}
    if many:
        rates["ib_write_bw"] = SPEED_ROUNDS * (MANY - FEW) * SPEED.size / (sum(many) - sum(few))
    return rates


async def _done(transport: Transport, batch: Batch) -> None:
    await transport.write(batch, Intent.KV_LOAD)


def _device(nic: str) -> tuple[str, int, int, str]:
    """Device, port, GID index and address of an interface."""
    place = Device(nic, NetworkConfig().rdma).place
    return place.port.device, place.port.number, place.gid.index, place.address


def _ib_write_bw(devices: list[tuple[str, int, int, str]], messages: int) -> float:
    """Wall seconds of a run from the first device to the second."""
    own, peer = devices
    common = ["-F", "-s", str(SPEED.size), "-n", str(messages)]
    ends = [[f"--ib-dev={name}", f"--ib-port={port}", f"--gid-index={gid}"] for name, port, gid, _ in (peer, own)]
    with subprocess.Popen(["ib_write_bw", *ends[0], *common], stdout=subprocess.DEVNULL) as server:
        for _ in range(SERVER_TRIES):
            time.sleep(0.5)
            begun = time.perf_counter()
            client = subprocess.run(
                ["ib_write_bw", *ends[1], *common, peer[3]], capture_output=True, text=True, timeout=120, check=False
            )
            seconds = time.perf_counter() - begun
            if "Couldn't connect" not in client.stderr:
                break
        server.kill()
    if client.returncode:
        raise ConfigError(f"ib_write_bw: {client.stderr.strip() or client.stdout.strip()}")
    return seconds


async def main(own: str, peer: str) -> dict[str, Any]:
    one_by_one = await cost_one_by_one(own, peer)
    rates = await throughput(own, peer)
    outside, post = await cost_of_lists(own, peer)  # last: its stopwatches stay
    ratios = {"verbs_python_vs_one_by_one": outside / one_by_one}
    if "ib_write_bw" in rates:
        ratios["verbs_vs_ib_write_bw"] = rates["verbs"] / rates["ib_write_bw"]
    return {
        "clock_us": clock_s() * 1e6,
        "python_us_per_write": outside * 1e6,
        "post_us_per_write": post * 1e6,
        "one_by_one_us_per_write": one_by_one * 1e6,
        "mib_per_s": {name: rate / 2**20 for name, rate in rates.items()},
        "ratios": ratios,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench.verbs", description="What RDMA costs in Python")
    parser.add_argument("own", help="RDMA interface: address or device")
    parser.add_argument("peer", help="another one that it reaches")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            report = runner.run(main(options.own, options.peer))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(
        f"Python per work request, lists of {LIST_WRITES}: {report['python_us_per_write']:.2f} us "
        f"(and {report['post_us_per_write']:.2f} us in ibv_post_send); "
        f"built and posted one by one: {report['one_by_one_us_per_write']:.2f} us"
    )
    print(", ".join(f"{name}: {rate:.0f} MiB/s" for name, rate in report["mib_per_s"].items()))
    print(json.dumps({"ratios": report["ratios"]}))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
