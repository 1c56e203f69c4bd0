"""Transfers to peers in processes of their own: killed, stopped, withdrawn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from common.transport.base import TransferError
from tests.rdma_support import VERBS
from tests.transport_peer import Peer, running_peer
from tests.transport_support import LOOPS, MIB, End, end, noise, run

SIZE = 16 * MIB
each_kind = pytest.mark.parametrize("kind", ["shm", "tcp", VERBS])


async def _ask(peer: Peer, line: str) -> str:
    return await asyncio.to_thread(peer.ask, line)


def _mapped() -> bool:
    with open("/proc/self/maps") as maps:
        return any("dualpath-peer" in line for line in maps)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["shm", "tcp", VERBS, "auto"])
def test_bytes_reach_another_process_and_a_withdrawn_region_refuses_them(loop: str, kind: str) -> None:
    async def scenario() -> None:
        with running_peer(kind, SIZE) as peer:
            async with end(kind) as writer:
                source, memory = writer.region(SIZE, noise(SIZE))
                await writer.copy(source, peer.region)
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(memory.view)
                await _ask(peer, "deregister")
                memory.view[:] = bytes(SIZE)
                with pytest.raises(TransferError):
                    await writer.copy(source, peer.region)
                assert not _mapped()
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(noise(SIZE))

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["tcp", VERBS])
def test_a_peer_that_is_given_up_holds_up_nobody_until_the_deadline(loop: str, kind: str) -> None:
    """As when its cable is out: there is no answer, and no reset either. What is read after that is not read for it."""

    async def scenario() -> None:
        with running_peer(kind, SIZE) as peer, running_peer(kind, SIZE) as other:
            async with end(kind, transfer_s=100.0) as writer:
                source, memory = writer.region(SIZE, 1)
                await writer.copy(source, peer.region)
                peer.process.send_signal(signal.SIGSTOP)
                stuck = [writer.copy(source, peer.region) for _ in range(3)]
                await asyncio.sleep(0.1)
                await writer.copy(source, other.region)
                writer.transport.give_up(peer.region)
                async with asyncio.timeout(50):
                    for transfer in stuck:
                        with pytest.raises(TransferError, match="has been given up"):
                            await transfer
                memory.view[:] = noise(SIZE).data  # it is ours again
                await writer.copy(source, other.region)
                assert await _ask(other, "digest") == xxh3_64_hexdigest(memory.view)
                peer.process.send_signal(signal.SIGCONT)
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(bytes([1]) * SIZE)
                await writer.copy(source, peer.region)
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(memory.view)

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
@each_kind
def test_kill_9_of_the_peer_in_mid_transfer(loop: str, kind: str) -> None:
    """The transfer fails well before its deadline, and the dead peer's memory is given back."""

    async def scenario() -> None:
        with running_peer(kind, SIZE) as peer:
            async with end(kind, transfer_s=10.0) as writer:
                source, _ = writer.region(SIZE, 1)
                await writer.copy(source, peer.region)
                killed_at = None
                for attempt in range(200):
                    transfer = writer.copy(source, peer.region)
                    if attempt == 3:
                        await asyncio.sleep(0.001)
                        peer.process.send_signal(signal.SIGKILL)
                        killed_at = time.monotonic()
                    try:
                        await transfer
                    except TransferError:
                        break
                assert killed_at is not None and time.monotonic() - killed_at < 2.0
                with pytest.raises(TransferError):
                    await writer.copy(source, peer.region)
                await asyncio.sleep(0.05)
                assert not _mapped()

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
@each_kind
def test_a_write_to_a_peer_that_has_just_died_is_no_success(loop: str, kind: str) -> None:
    """Not even where its memory is still mapped here."""

    async def scenario() -> None:
        with running_peer(kind, MIB) as peer:
            async with end(kind) as writer:
                source, _ = writer.region(MIB, 1)
                await writer.copy(source, peer.region)
                peer.process.kill()
                peer.process.wait()
                with pytest.raises(TransferError):
                    await writer.copy(source, peer.region)

    run(loop, scenario())


@pytest.mark.parametrize("ending", ["deadline", "cancel"])
def test_a_stopped_peer_fails_transfers_in_time_and_writes_nothing_later(ending: str) -> None:
    """What its kernel had taken for it is dropped: the memory may belong to somebody else when it wakes up."""

    async def scenario() -> None:
        with running_peer("tcp", SIZE) as peer:
            async with end("tcp", transfer_s=0.5) as writer:
                source, _ = writer.region(SIZE, 1)
                peer.process.send_signal(signal.SIGSTOP)
                transfer = writer.copy(source, peer.region)
                await asyncio.sleep(0.1)
                begun = time.monotonic()
                if ending == "cancel":
                    await transfer.cancel()
                with pytest.raises(TransferError):
                    await transfer
                assert time.monotonic() - begun < 2.0
                peer.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.2)
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(np.zeros(SIZE, np.uint8))
                await writer.copy(source, peer.region)
                assert await _ask(peer, "digest") == xxh3_64_hexdigest(np.ones(SIZE, np.uint8))

    run("uvloop", scenario())


WRITER = """
import sys, time
from common.transport.memory import Memory
memory = Memory.open(sys.argv[1], 100)
with memory.writing(bytes.fromhex(sys.argv[2])):
    memory.view[0] = 1
    time.sleep(60)
"""


def _writer(path: str, key: bytes) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, path, key.hex()])


def test_deregister_does_not_trust_a_peer_that_has_stopped_in_mid_write() -> None:
    """shm: it fails while the peer might go on, and returns once the peer is dead."""

    async def scenario() -> None:
        async with end("shm", transfer_s=0.3) as owner:
            region, memory = owner.region(MIB)
            other = owner.transport.register(memory)
            with _writer(memory.path, region.key) as writer:
                while not memory.view[0]:
                    await asyncio.sleep(0.01)
                writer.send_signal(signal.SIGSTOP)
                await owner.transport.deregister(other)
                with pytest.raises(TransferError, match="does not end"):
                    await owner.transport.deregister(region)
                again = owner.transport.register(memory)
                writer.kill()
            await owner.transport.deregister(again)

    run("asyncio", scenario())


@each_kind
def test_many_peers_come_and_go(kind: str) -> None:
    """Case C18 and its like: nothing of a peer that has left stays open here."""

    async def one(writer: End, source: Any) -> None:
        with running_peer(kind, MIB) as peer:
            await writer.copy(source, peer.region)
            peer.process.kill()
            peer.process.wait()

    async def scenario() -> None:
        async with end(kind) as writer:
            source, _ = writer.region(MIB, 1)
            await writer.write(source, source, (0, 1, 200_000))
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                await one(writer, source)
            await asyncio.sleep(0.1)
            assert len(os.listdir("/proc/self/fd")) == before and not _mapped()

    run("uvloop", scenario())
