"""The verbs transport without permissions, with peers that stop and with links that go, on RDMA devices."""

from __future__ import annotations

import asyncio
import ctypes
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from common.transport.base import TransferError
from common.transport.region import RegionDescriptor
from common.transport.verbs.listener import WITHDRAW_S
from common.wire import encode
from tests.rdma_support import RAILS, ends, needs_rdma, pulled
from tests.transport_peer import running_peer
from tests.transport_support import MIB, end, noise, run

pytestmark = needs_rdma

CAP_DAC_OVERRIDE, CAP_IPC_LOCK, PR_CAPBSET_DROP = 1, 14, 24
UNPRIVILEGED = """
import sys
from common.config import RdmaConfig
from common.errors import ConfigError
from common.transport.memory import Memory
from common.transport.verbs.device import Device
try:
    device = Device(sys.argv[1], RdmaConfig())
    device.register(Memory.create("test", 1 << 20))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("mode", "fix"),
    [(0o000, "cannot open the RDMA device .* read and write /dev/infiniband"), (0o666, "ulimit -l unlimited")],
)
def test_without_permission_for_the_device_or_to_lock_memory(mode: int, fix: str) -> None:
    def give_up_privileges() -> None:
        for capability in (CAP_DAC_OVERRIDE, CAP_IPC_LOCK):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))

    for device in Path("/dev/infiniband").glob("uverbs*"):
        device.chmod(mode)
    told = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, ends("verbs")[0]],
        preexec_fn=give_up_privileges,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert re.search(fix, told.stdout), told.stdout + told.stderr
    assert told.stdout.count("\n") == 1


# ---- peers that stop, links that go ----------------------------------------------------------------------------------

BUSY_WRITER = """
import asyncio, sys
from common.config import NetworkConfig
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, make_runs
from common.transport.memory import Memory
from common.transport.select import open_transport
from common.wire import decode

async def main(address, region):
    transport = open_transport(NetworkConfig(transport="verbs"), address, Metrics(), Faults([], ""), 60.0)
    await transport.start()
    memory = Memory.create("writer", region.size)
    memory.view[:] = bytes([7]) * region.size
    source = transport.register(memory)
    batch = Batch(source, region, make_runs(0, 0, region.size))
    while True:
        await transport.write(batch, Intent.KV_LOAD)

asyncio.run(main(sys.argv[1], decode(bytes.fromhex(sys.argv[2]))))
"""


def _busy_writer(address: str, region: RegionDescriptor) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUSY_WRITER, address, encode(region).hex()])


def test_a_writer_that_does_not_answer_is_cut_off_when_its_region_is_withdrawn() -> None:
    """It is stopped in the middle of writing. After deregister() nothing of it changes memory any more, though its NIC
    and its queue may still be full, and it may wake up."""

    async def scenario() -> None:
        own, other = ends("verbs")
        async with end("verbs", other) as owner:
            region, memory = owner.region(8 * MIB)
            with _busy_writer(own, region) as writer:
                while not memory.view[-1]:
                    await asyncio.sleep(0.01)
                writer.send_signal(signal.SIGSTOP)
                begun = time.monotonic()
                await owner.transport.deregister(region)
                assert time.monotonic() - begun < WITHDRAW_S + 5
                memory.view[:] = bytes(8 * MIB)
                writer.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                assert not np.frombuffer(memory.view, np.uint8).any()
                writer.kill()

    run("asyncio", scenario())


def test_a_stopped_peer_fails_transfers_at_their_deadline_and_is_reached_again_later() -> None:
    """Its NIC takes the bytes, but nobody says that they are there: that is no success."""

    async def scenario() -> None:
        size = 2 * MIB
        with running_peer("verbs", size) as peer:
            async with end("verbs", transfer_s=1.0) as writer:
                source, memory = writer.region(size, noise(size))
                await writer.copy(source, peer.region)
                peer.process.send_signal(signal.SIGSTOP)
                memory.view[:] = bytes(size)
                begun = time.monotonic()
                with pytest.raises(TransferError, match="in time"):
                    await writer.copy(source, peer.region)
                assert time.monotonic() - begun < 5
                peer.process.send_signal(signal.SIGCONT)
                memory.view[:] = noise(size, 3).data
                await writer.copy(source, peer.region)
                assert await asyncio.to_thread(peer.ask, "digest") == xxh3_64_hexdigest(memory.view)

    run("uvloop", scenario())


def test_a_link_that_is_pulled_fails_transfers_in_time() -> None:
    """And they go through again when it is back."""

    async def scenario() -> None:
        own, other = RAILS[-1]
        async with end("verbs", own, transfer_s=4.0) as writer, end("verbs", other, transfer_s=4.0) as peer:
            source, _ = writer.region(8 * MIB, noise(8 * MIB))
            target, memory = peer.region(8 * MIB)
            await writer.copy(source, target)
            with pulled(own):
                begun = time.monotonic()
                with pytest.raises(TransferError):
                    await writer.copy(source, target)
                assert time.monotonic() - begun < 10
            memory.view[:] = bytes(8 * MIB)
            async with asyncio.timeout(20):
                while True:
                    try:
                        await writer.copy(source, target)
                        break
                    except TransferError:
                        await asyncio.sleep(0.2)
            assert bytes(memory.view) == noise(8 * MIB).tobytes()

    run("uvloop", scenario())
