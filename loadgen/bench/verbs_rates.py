"""Throughput of the verbs transport and of ib_write_bw (perftest) between the same two devices, by one measure: what
the receiving device counts.

In turns, several short windows of steady state each: neither start-up nor anybody's own clock counts. Both write one
way, messages of one size over one MTU, with as many under way. The device's counter tells packets, repeated ones apart,
so what is compared is what arrived.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.config import NetworkConfig
from common.errors import ConfigError
from common.transport.base import Batch, Intent, Transport
from common.transport.verbs.device import Device
from common.transport.verbs.nics import Place
from common.transport.verbs.work import LIST_WRITES
from common.transport.verbs.writer import MAX_LISTS

#: Bytes of a message: the default of ib_write_bw.
MESSAGE_BYTES = 64 << 10
#: Messages under way, on either side.
DEPTH = MAX_LISTS * LIST_WRITES
ROUNDS, WARM_UP_S, WINDOW_S = 9, 0.5, 1.0
#: For either side of ib_write_bw to be there.
START_S, POLL_S = 30.0, 0.1
#: Of one run: it is ended long before.
MESSAGES = 1_000_000


class Received:
    """Packets that a port of software RoCE has taken in, as often as they were meant to come."""

    def __init__(self, place: Place) -> None:
        """ConfigError where the device has no such counters."""
        self._counters = Path(f"/sys/class/infiniband/{place.port.device}/ports/{place.port.number}/hw_counters")
        self._mtu = place.mtu
        if not (self._counters / "rcvd_pkts").exists():
            raise ConfigError(f"{place.port} does not count packets as software RoCE does: rates are not compared")

    def packets(self) -> int:
        names = ("rcvd_pkts", "duplicate_request", "out_of_seq_request")
        taken, again, early = (int((self._counters / name).read_text()) for name in names)
        return taken - again - early

    async def rate(self) -> float:
        """Bytes a second over a window that begins when what runs has warmed up."""
        await asyncio.sleep(WARM_UP_S)
        packets, begun = self.packets(), time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        packets, seconds = self.packets() - packets, time.perf_counter() - begun
        return packets * self._mtu / seconds


@asynccontextmanager
async def writing(transport: Transport, batch: Batch, flows: int) -> AsyncIterator[None]:
    """Transfers of the batch, so many side by side, for as long as the context lasts."""
    go_on = True

    async def write() -> None:
        while go_on:
            await transport.write(batch, Intent.KV_LOAD)

    async with asyncio.TaskGroup() as group:
        for _ in range(flows):
            group.create_task(write())
        try:
            yield
        finally:
            go_on = False


@asynccontextmanager
async def ib_write_bw(own: Place, peer: Place, received: Received) -> AsyncIterator[None]:
    """It writes from one to the other for as long as the context lasts. ConfigError if it does not begin."""
    client = None
    server = await _start(peer)
    try:
        async with asyncio.timeout(START_S):
            before = received.packets()
            while received.packets() - before < DEPTH:
                if client is None or client.returncode is not None:  # the server was not there yet
                    client = await _start(own, peer.address)
                await asyncio.sleep(POLL_S)
        yield
    except TimeoutError:
        raise ConfigError(f"ib_write_bw does not write from {own.port} to {peer.port}: try it by hand") from None
    finally:
        for process in filter(None, (client, server)):
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _start(place: Place, *server: str) -> asyncio.subprocess.Process:
    command = [
        "ib_write_bw",
        f"--ib-dev={place.port.device}",
        f"--ib-port={place.port.number}",
        f"--gid-index={place.gid.index}",
        f"--mtu={place.mtu}",
        f"--size={MESSAGE_BYTES}",
        f"--tx-depth={DEPTH}",
        f"--iters={MESSAGES}",
        "--noPeak",
        "-F",
        *server,
    ]
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)


async def measure_rates(transport: Transport, batch: Batch, own: str, peer: str, flows: int) -> dict[str, list[float]]:
    """Bytes a second in each round, of this transport and of ib_write_bw. ConfigError without that."""
    if shutil.which("ib_write_bw") is None:
        raise ConfigError("ib_write_bw is not installed (package perftest): rates are not compared")
    from_, to = [await asyncio.to_thread(_place, nic) for nic in (own, peer)]
    received = Received(to)
    rates: dict[str, list[float]] = {"verbs": [], "ib_write_bw": []}
    for _ in range(ROUNDS):
        async with writing(transport, batch, flows):
            rates["verbs"].append(await received.rate())
        async with ib_write_bw(from_, to, received):
            rates["ib_write_bw"].append(await received.rate())
    return rates


def _place(nic: str) -> Place:
    device = Device(nic, NetworkConfig().rdma)
    device.close()
    return device.place
