"""What RDMA costs in Python, and whether it is as fast as the device: python -m loadgen.bench.verbs OWN PEER.

OWN and PEER are two RDMA interfaces of this host that reach one another (addresses, or devices). Printed, and written
with --out as JSON with a flat map "ratios":

- Python time per work request outside ibv_post_send, in steady state, lists of 64: cutting transfers into lists, aiming
  and posting these, taking their completions; less what reading the clock costs. Beside it the same writes built,
  posted and waited for one by one. A software device transmits inside the post, so the post says nothing of a NIC; it
  is printed apart, and so are the calls to the completion channel, which take long under a guest's kernel. Of many
  calls the least disturbed count, with the median beside them: what else runs only adds.
- Throughput against ib_write_bw (perftest) between the same devices, where it is installed (loadgen.bench.verbs_rates).

The passive side is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
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
from common.transport.verbs.queue_pair import QueuePair
from common.transport.verbs.work import LIST_WRITES
from common.transport.verbs.writer import Connection
from common.wire import decode, encode
from loadgen.bench.cycles import CycleClock
from loadgen.bench.pair import Process
from loadgen.bench.pieces import Layout
from loadgen.bench.rounds import spread
from loadgen.bench.side import Side
from loadgen.bench.verbs_rates import DEPTH, MESSAGE_BYTES, measure_rates

new_event_loop = uvloop.new_event_loop
TRANSFER_S = 60.0
#: Of the cost: short writes, so that a software device is soon done with them, but too long to travel inline.
COST = Layout(1024, 8 * LIST_WRITES)
COST_ROUNDS = 100
#: Of the throughput: so many transfers side by side keep as many messages under way as may be.
SPEED = Layout(MESSAGE_BYTES, DEPTH)
SPEED_TRANSFERS = 2


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


def clock_s(clock: CycleClock) -> float:
    """What reading the clock costs."""
    return min(-(clock() - clock()) for _ in range(1000))


def undisturbed(times: Sequence[float]) -> float:
    """Their 5th percentile: whatever else the machine does can only add, but for a guest's clock that stands still."""
    return sorted(times)[len(times) // 20]


class Stopwatches:
    """Time of each call of what sends, the posts within it apart; less what reading the clock adds.

    outside: seconds in Python of each call, by function and how often it posted: such calls are alike. posts: seconds
    in ibv_post_send of each list. channel: seconds of each call to the completion channel.
    """

    def __init__(self, clock: CycleClock) -> None:
        self.outside: dict[tuple[str, int], list[float]] = {}
        self.posts: list[float] = []
        self.channel: list[float] = []
        self._clock = clock
        self._clock_s = clock_s(clock)
        self._within = False
        for owner, name in ((Connection, "add"), (Connection, "_pump_on"), (QueuePair, "_on_event")):
            self._watch(owner, name)
        self._watch_apart("post", self.posts)
        for name in ("_take_event", "_arm"):
            self._watch_apart(name, self.channel)

    def _watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            if self._within:
                return function(*arguments)
            self._within, posted, called = True, len(self.posts), len(self.channel)
            begun = self._clock()
            try:
                return function(*arguments)
            finally:
                seconds = self._clock() - begun
                posts = self.posts[posted:]
                apart = [*posts, *self.channel[called:]]
                # each of them has read the clock twice; one of the readings is in its own time
                seconds -= sum(apart) + (1 + 2 * len(apart)) * self._clock_s
                self.outside.setdefault((name, len(posts)), []).append(seconds)
                self._within = False

        setattr(owner, name, watched)

    def _watch_apart(self, name: str, times: list[float]) -> None:
        """A call of the queue pair into the device or the kernel."""
        function: Callable[..., Any] = getattr(QueuePair, name)

        def watched(*arguments: Any) -> Any:
            begun = self._clock()
            try:
                return function(*arguments)
            finally:
                times.append(self._clock() - begun - self._clock_s)

        setattr(QueuePair, name, watched)

    def reset(self) -> None:
        self.outside.clear()
        self.posts.clear()
        self.channel.clear()

    def per_write(self, of: Callable[[Sequence[float]], float], writes: int) -> dict[str, float]:
        """Seconds a write in Python, in posts and in the channel, where of says what a call of a kind takes."""
        outside = sum(len(calls) * of(calls) for calls in self.outside.values())
        apart = {"post": self.posts, "channel": self.channel}
        return {"python": outside / writes} | {kind: len(calls) * of(calls) / writes for kind, calls in apart.items()}


async def cost_of_lists(own: str, peer: str, clock: CycleClock) -> Stopwatches:
    """Of COST_ROUNDS transfers of COST."""
    watches = Stopwatches(clock)
    async with _batch(COST, own, peer) as (transport, batch):
        await transport.write(batch, Intent.KV_LOAD)
        watches.reset()
        for _ in range(COST_ROUNDS):
            await transport.write(batch, Intent.KV_LOAD)
    return watches


async def cost_one_by_one(own: str, peer: str, clock: CycleClock) -> list[float]:
    """Seconds per write in Python outside the post, round by round, when each is built anew, posted with its own
    doorbell and waited for: by the same queue pair, of which nothing else makes use meanwhile."""
    async with _batch(Layout(COST.size, LIST_WRITES), own, peer) as (transport, batch):
        await transport.write(batch, Intent.KV_LOAD)
        mover = transport._remote[0]  # type: ignore[attr-defined]
        ((_, connection),) = mover._connections.items()
        source, target = mover._registrations[batch.source.key], connection._grants[batch.target.key]
        connection._loop.remove_reader(connection._pair._fd)
        writes = (batch.runs + np.array([source.address, target.address, 0])).tolist()
        rounds = [_one_by_one(connection._pair, writes, source.lkey, target.rkey, clock) for _ in range(COST_ROUNDS)]
    return [seconds / LIST_WRITES for seconds in rounds]


def _one_by_one(pair: QueuePair, writes: list[list[int]], lkey: int, rkey: int, clock: CycleClock) -> float:
    """Seconds in Python outside the posts and the waits, which are the device's."""
    from pyverbs.wr import SGE, SendWR

    verbs = constants()
    device_s, begun = 0.0, clock()
    for source, target, length in writes:
        element = SGE(source, length, lkey)
        request = SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[element], send_flags=verbs.IBV_SEND_SIGNALED)
        request.set_wr_rdma(rkey, target)
        before = clock()
        pair._pair.post_send(request)
        while not pair._queue.poll(1)[0]:
            time.sleep(0)
        device_s += clock() - before
        request.close()
    return clock() - begun - device_s - clock_s(clock) * len(writes)


async def throughput(own: str, peer: str) -> dict[str, list[float]]:
    """Bytes a second of this transport and of ib_write_bw, round by round. ConfigError if they cannot be compared."""
    async with _batch(SPEED, own, peer) as (transport, batch):
        return await measure_rates(transport, batch, own, peer, SPEED_TRANSFERS)


async def main(own: str, peer: str) -> dict[str, Any]:
    clock = CycleClock()
    one_by_one = await cost_one_by_one(own, peer, clock)
    report: dict[str, Any] = {"clock_us": clock_s(clock) * 1e6, "ratios": {}, "spreads": {}, "mib_per_s": {}}
    try:
        rates = await throughput(own, peer)
    except ConfigError as error:
        report["not_compared"] = str(error)
    else:
        report["mib_per_s"] = {name: spread([rate / 2**20 for rate in found]) for name, found in rates.items()}
        found = spread([ours / theirs for ours, theirs in zip(*rates.values(), strict=True)])
        report["ratios"]["verbs_vs_ib_write_bw"] = found["median"]
        report["spreads"]["verbs_vs_ib_write_bw"] = found
    watches = await cost_of_lists(own, peer, clock)  # last: they stay
    cost: dict[str, dict[str, float]] = {}
    for name, of in (("undisturbed", undisturbed), ("median", statistics.median)):
        costs = watches.per_write(of, COST_ROUNDS * COST.count) | {"one_by_one": of(one_by_one)}
        for kind, seconds in costs.items():
            cost.setdefault(kind, {})[name] = seconds * 1e6
    report["us_per_write"] = cost
    report["ratios"]["verbs_python_vs_one_by_one"] = cost["python"]["undisturbed"] / cost["one_by_one"]["undisturbed"]
    return report


def told(report: dict[str, Any]) -> list[str]:
    """The report in words."""
    cost = {
        name: f"{one['undisturbed']:.2f} us (median {one['median']:.2f})"
        for name, one in report["us_per_write"].items()
    }
    lines = [
        f"Python per work request, lists of {LIST_WRITES}: {cost['python']}; in ibv_post_send: {cost['post']}; "
        f"in calls to the completion channel: {cost['channel']}; built and posted one by one: {cost['one_by_one']}; "
        f"reading the clock takes {report['clock_us']:.2f} us"
    ]
    for name, rate in report["mib_per_s"].items():
        lines.append(f"{name}: {rate['median']:.0f} MiB/s (quartiles {rate['q1']:.0f} - {rate['q3']:.0f})")
    if "not_compared" in report:
        lines.append(report["not_compared"])
    return [*lines, json.dumps({"ratios": report["ratios"], "spreads": report["spreads"]})]


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
    print("\n".join(told(report)))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
