"""Transports behind paced NICs: who is slowed down by what, that all bytes arrive, and what is counted.

A lower bound on a transfer's time is sure on any machine; there are no others here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.transport.base import Batch, Intent, TransferError, make_runs
from common.transport.memory import Memory
from common.transport.mover import Job
from common.transport.nic import MIN_PIECE_BYTES, TICK_S, Nic, cut_job
from tests.transport_support import LOOPS, MIB, End, end, noise, run

each_loop = pytest.mark.parametrize("loop", LOOPS)
each_kind = pytest.mark.parametrize("kind", ["shm", "tcp"])
RATE = 8.0 * MIB


@asynccontextmanager
async def ends(kind: str, *nics: Nic | None, transfer_s: float = 20.0) -> AsyncIterator[list[End]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(end(kind, transfer_s=transfer_s, nic=nic)) for nic in nics]


async def seconds(*transfers: Any) -> float:
    begun = time.monotonic()
    for transfer in transfers:
        await transfer
    return time.monotonic() - begun


@each_loop
@each_kind
@pytest.mark.parametrize("paced", ["writer", "target"])
def test_a_paced_nic_takes_its_time_on_either_side(loop: str, kind: str, paced: str) -> None:
    """2 MiB at 8 MiB/s are on the wire for 1/4 s, in pieces; every byte arrives."""
    nic, free = Nic("node/snic", RATE), Nic("other/snic")

    async def scenario() -> None:
        async with ends(kind, *((nic, free) if paced == "writer" else (None, nic))) as (writer, peer):
            source, _ = writer.region(2 * MIB, noise(2 * MIB))
            target, memory = peer.region(2 * MIB)
            assert (target.nic, target.rate) == (("other/snic", 0.0) if paced == "writer" else ("node/snic", RATE))
            assert await seconds(writer.copy(source, target)) >= 0.25 - TICK_S
            assert bytes(memory.view) == noise(2 * MIB).tobytes()

    run(loop, scenario())


@each_kind
def test_transfers_to_one_nic_share_it_and_others_are_not_held_up(kind: str) -> None:
    nics = [None, Nic("a/snic", RATE), Nic("b/snic")]

    async def scenario() -> None:
        async with ends(kind, *nics) as (gateway, slow, fast):
            source, _ = gateway.region(MIB, noise(MIB))
            target, memory = slow.region(2 * MIB)
            first, second = slow.region(MIB)[0], fast.region(MIB)[0]
            slowed = [gateway.copy(source, target) for _ in range(2)] + [gateway.copy(source, first)]
            await gateway.copy(source, second)
            assert not any(transfer.task.done() for transfer in slowed)  # type: ignore[attr-defined]
            for transfer in slowed:
                await transfer
            assert bytes(memory.view[:MIB]) == noise(MIB).tobytes()

    run("uvloop", scenario())


def test_host_device_copies_go_through_the_nic_too() -> None:
    """In and out of it: both directions are one NIC's, so together they take no longer than either."""

    async def scenario() -> None:
        async with ends("shm", Nic("node/0/cnic", RATE)) as (one,):
            source, _ = one.region(MIB, noise(MIB))
            target, memory = one.region(MIB)
            assert await seconds(one.copy(source, target)) >= 0.125 - TICK_S
            assert bytes(memory.view) == noise(MIB).tobytes()
            for direction in ("tx", "rx"):
                assert counted(one, "node/0/cnic", direction, "kv", "kv_load") == MIB

    run("uvloop", scenario())


@each_kind
def test_the_higher_class_overtakes(kind: str) -> None:
    async def scenario() -> None:
        async with ends(kind, None, Nic("node/cnic", RATE)) as (writer, peer):
            source, _ = writer.region(MIB, 1)
            order: list[Intent] = []
            intents = [Intent.KV_PERSIST, Intent.KV_LOAD, Intent.MODEL_COLLECTIVE]
            targets = [peer.region(MIB)[0] for _ in intents]

            async def copied(intent: Intent, target: Any) -> None:
                await writer.copy(source, target, intent)
                order.append(intent)

            await asyncio.gather(*map(copied, intents, targets))
            assert order == intents[::-1]

    run("uvloop", scenario())


@each_loop
@each_kind
def test_cancel_returns_when_both_memories_are_quiet_and_the_wire_goes_on(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with ends(kind, Nic("a/cnic", RATE), Nic("b/cnic", RATE)) as (writer, peer):
            source, from_memory = writer.region(2 * MIB, 1)
            target, memory = peer.region(2 * MIB)
            other, other_memory = peer.region(MIB // 2)
            for wait in (0.0, 0.03, 0.06):
                doomed = writer.copy(source, target)
                bystander = writer.write(source, other, (0, 0, MIB // 2))
                await asyncio.sleep(wait)
                assert sum(queued(writer).values()) > 0
                await doomed.cancel()
                before = bytes(memory.view)
                assert before != bytes([1]) * len(before)
                from_memory.view[MIB:] = bytes([2]) * MIB  # ours again
                await bystander
                assert bytes(other_memory.view) == bytes([1]) * (MIB // 2)
                assert bytes(memory.view) == before
                with pytest.raises(TransferError, match="cancelled"):
                    await doomed
            assert sum(queued(writer).values()) == 0
            await writer.write(source, target, (0, 0, 5))

    run(loop, scenario())


@each_loop
@each_kind
def test_a_deadline_holds_while_the_nic_is_busy(loop: str, kind: str) -> None:
    async def scenario() -> None:
        async with ends(kind, Nic("a/cnic", RATE), None, transfer_s=0.1) as (writer, peer):
            source, _ = writer.region(4 * MIB, 1)
            target, memory = peer.region(4 * MIB)
            transfers = [writer.copy(source, target) for _ in range(2)]
            for transfer in transfers:
                with pytest.raises(TransferError):
                    await transfer
            before = bytes(memory.view)
            await asyncio.sleep(0.05)
            assert bytes(memory.view) == before and before[-1] == 0
            assert sum(queued(writer).values()) == 0
            await writer.write(source, target, (0, 0, 5))

    run(loop, scenario())


@each_kind
def test_a_target_that_goes_away_between_pieces_fails_the_transfer(kind: str) -> None:
    async def scenario() -> None:
        async with ends(kind, Nic("a/cnic", RATE), None) as (writer, peer):
            source, _ = writer.region(2 * MIB, 1)
            target, memory = peer.region(2 * MIB)
            transfer = writer.copy(source, target)
            await asyncio.sleep(0.03)
            await peer.transport.deregister(target)
            before = bytes(memory.view)
            with pytest.raises(TransferError):
                await transfer
            assert bytes(memory.view) == before

    run("uvloop", scenario())


def test_closing_ends_what_waits_for_the_nic() -> None:
    async def scenario() -> None:
        async with ends("shm", Nic("a/cnic", 1000.0), None) as (writer, peer):
            source, _ = writer.region(MIB, 1)
            target, _ = peer.region(MIB)
            transfers = [writer.copy(source, target) for _ in range(3)]
            await asyncio.sleep(0.01)
            await writer.transport.close()
            for transfer in transfers:
                with pytest.raises(TransferError):
                    await transfer

    run("uvloop", scenario())


def test_null_moves_nothing_and_takes_no_time() -> None:
    """Also where the configuration has rates (Oracle, spec §9): a byte a second would take days here."""

    async def scenario() -> None:
        async with ends("null", Nic("a/cnic", 1.0), Nic("b/cnic", 1.0)) as (writer, peer):
            source, _ = writer.region(MIB)
            target, _ = peer.region(MIB)
            assert target.rate == 0
            await writer.copy(source, target)
            await writer.copy(source, source)

    run("uvloop", scenario())


def counted(one: End, nic: str, direction: str, traffic_class: str, intent: str) -> float:
    return one.counted("nic_bytes", nic=nic, direction=direction, traffic_class=traffic_class, intent=intent)


def queued(one: End) -> dict[str, float]:
    return {name: value for name, value in one.metrics.snapshot().items() if name.startswith("nic_queued_bytes")}


@pytest.mark.parametrize("rate", [0.0, 1e9])
def test_bytes_are_counted_where_they_are_written_for_both_nics(rate: float) -> None:
    async def scenario() -> None:
        async with ends("shm", Nic("a/cnic", rate), Nic("b/cnic", rate), None) as (writer, peer, unnamed):
            source, _ = writer.region(1000, 1)
            target, _ = peer.region(1000)
            await writer.copy(source, target, Intent.KV_PERSIST)
            await writer.copy(source, unnamed.region(1000)[0], Intent.PD_HANDOFF)
            await unnamed.copy(unnamed.region(500)[0], target, Intent.MODEL_COLLECTIVE)
            assert counted(writer, "a/cnic", "tx", "background", "kv_persist") == 1000
            assert counted(writer, "b/cnic", "rx", "background", "kv_persist") == 1000
            assert counted(writer, "a/cnic", "tx", "kv", "pd_handoff") == 1000
            assert counted(unnamed, "b/cnic", "rx", "collective", "model_collective") == 500
            for one, total in ((writer, 3000), (unnamed, 500), (peer, 0)):
                values = one.metrics.snapshot()
                assert sum(value for name, value in values.items() if name.startswith("nic_bytes")) == total
            assert len(queued(peer)) == (3 if rate else 0)  # its way out, per class

    run("uvloop", scenario())


@given(
    lengths=st.lists(st.integers(1, 3 * MIN_PIECE_BYTES), min_size=1, max_size=20),
    rate=st.floats(1.0, 1e12) | st.just(float("inf")),
    corrupt=st.booleans(),
)
def test_pieces_are_the_whole_job(lengths: list[int], rate: float, corrupt: bool) -> None:
    offsets = np.cumsum([0, *(length + 1 for length in lengths)])
    memory = Memory.create("test", 1)
    region: Any = None
    runs = make_runs(offsets[:-1], offsets[:-1] * 2, lengths)
    pieces = list(cut_job(Job(memory, Batch(region, region, runs), Intent.KV_LOAD, 7.0, corrupt), rate))
    memory.close()
    assert [piece.corrupt for piece in pieces] == [corrupt] + [False] * (len(pieces) - 1)
    assert sum(piece.batch.num_bytes for piece in pieces) == sum(lengths)
    covered = np.concatenate([piece.batch.runs for piece in pieces])
    assert make_runs(*covered.T).tolist() == runs.tolist()
    assert all(piece.batch.num_bytes <= max(MIN_PIECE_BYTES, rate * 0.002) for piece in pieces)
