"""open_transport: which way a batch takes, what is counted, what injected faults do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import RETRYABLE
from common.faults import Fault
from common.transport.base import Batch, Intent, TransferError
from common.transport.memory import host_identity
from tests.rdma_support import VERBS
from tests.transport_support import LOOPS, MIB, end, noise, pair, run

KINDS = ["shm", "tcp", VERBS, "auto", "null"]


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_name_the_ways_in(kind: str) -> None:
    async def scenario() -> None:
        async with end(kind) as one:
            first, _ = one.region(10)
            second, _ = one.region(20)
            assert (first.size, second.size) == (10, 20)
            assert first.host == host_identity() and len(first.key) == 16 and first.key != second.key
            assert bool(first.shm) == (kind in ("shm", "auto"))
            assert bool(first.address) == (kind in ("tcp", "auto"))
            assert bool(first.verbs) == (kind == "verbs")

    run("uvloop", scenario())


def test_auto_is_shm_on_this_host_and_tcp_to_others() -> None:
    async def scenario() -> None:
        async with pair("auto") as (writer, peer):
            source, _ = writer.region(100, 1)
            target, memory = peer.region(200)
            await writer.copy(source, target)
            await writer.write(source, replace(target, host="elsewhere"), (0, 100, 100))
            assert bytes(memory.view) == bytes([1]) * 200
            for transport in ("shm", "tcp"):
                assert writer.counted("transport_bytes", intent="kv_load", transport=transport) == 100

    run("uvloop", scenario())


def test_auto_writes_to_peers_that_offer_only_one_way() -> None:
    async def scenario() -> None:
        async with end("auto") as writer, end("shm") as shm, end("tcp") as tcp:
            source, _ = writer.region(100, 1)
            for peer in (shm, tcp):
                target, memory = peer.region(100)
                await writer.copy(source, target)
                assert bytes(memory.view) == bytes([1]) * 100
        async with end("shm") as writer, end("tcp") as peer:
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            with pytest.raises(TransferError, match="no transport reaches"):
                writer.copy(source, target)

    run("uvloop", scenario())


@pytest.mark.parametrize("kind", ["shm", "tcp", VERBS, "null"])
def test_bytes_and_transfers_are_counted_by_intent_and_transport(kind: str) -> None:
    async def scenario() -> None:
        async with pair(kind) as (writer, peer):
            source, _ = writer.region(1000, 1)
            target, _ = peer.region(1000)
            for count, intent in enumerate(Intent, 1):
                for _ in range(count):
                    await writer.copy(source, target, intent)
            for count, intent in enumerate(Intent, 1):
                labels = {"intent": intent.value, "transport": kind}
                assert writer.counted("transport_bytes", **labels) == 1000 * count
                assert writer.counted("transport_transfers", **labels) == count
                assert writer.counted("transport_failures", **labels) == 0
            assert peer.counted("transport_bytes", intent="kv_load", transport=kind) == 0

    run("uvloop", scenario())


def _fault(action: str, **rest: Any) -> Fault:
    return Fault(point="transfer", action=action, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_faults_strike_the_transfers_they_name(loop: str, kind: str) -> None:
    """Case A13: transfer 3 fails, its neighbours and its successors do not."""

    async def scenario() -> None:
        rule = _fault("fail", type="pd_handoff", after=2)
        async with end(kind, faults=(rule,)) as writer, end(kind) as peer:
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            assert await _failed(writer.copy(source, target, Intent.KV_LOAD)) is None
            handoffs = [writer.copy(source, target, Intent.PD_HANDOFF) for _ in range(5)]
            outcomes = [await _failed(transfer) for transfer in handoffs]
            assert [outcome is not None for outcome in outcomes] == [False, False, True, False, False]
            assert outcomes[2] is not None and outcomes[2].code in RETRYABLE

    run(loop, scenario())


async def _failed(transfer: Any) -> TransferError | None:
    try:
        await transfer
    except TransferError as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["shm", "tcp", VERBS])
def test_delay_duplicate_and_drop(kind: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        faults = (
            _fault("delay", type="kv_load", seconds=0.15),
            _fault("duplicate", type="pd_handoff"),
            _fault("drop", type="kv_persist"),
        )
        async with end(kind, transfer_s=0.4, faults=faults) as writer, end(kind) as peer:
            source, _ = writer.region(MIB, noise(MIB))
            target, memory = peer.region(MIB)
            begun = loop.time()
            await writer.copy(source, target, Intent.KV_LOAD)
            assert loop.time() - begun >= 0.14
            assert bytes(memory.view) == noise(MIB).tobytes()
            await writer.copy(source, target, Intent.PD_HANDOFF)
            assert writer.counted("transport_bytes", intent="pd_handoff", transport=kind) == 2 * MIB
            with pytest.raises(TransferError, match="drop"):
                await writer.copy(source, target, Intent.KV_PERSIST)
            assert loop.time() - begun >= 0.5

    run("uvloop", scenario())


@pytest.mark.parametrize("kind", ["shm", "tcp", VERBS])
def test_a_delay_past_the_deadline_is_a_failure(kind: str) -> None:
    async def scenario() -> None:
        async with end(kind, transfer_s=0.1, faults=(_fault("delay", seconds=0.2),)) as writer, end(kind) as peer:
            source, _ = writer.region(100, 1)
            target, memory = peer.region(100)
            with pytest.raises(TransferError):
                await writer.copy(source, target)
            assert not any(memory.view)
            await writer.copy(source, target)

    run("uvloop", scenario())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("run_bytes", [3 * MIB, 512], ids=["one run", "many short runs"])
def test_corruption_on_the_wire_is_noticed(loop: str, run_bytes: int) -> None:
    async def scenario() -> None:
        async with end("tcp", faults=(_fault("corrupt"),)) as writer, end("tcp") as peer:
            source, _ = writer.region(3 * MIB, 1)
            target, memory = peer.region(3 * MIB)
            starts = np.arange(0, 3 * MIB, run_bytes)
            runs = np.stack([starts, starts[::-1], np.full(len(starts), run_bytes)], axis=1)
            with pytest.raises(TransferError, match="checksum"):
                await writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)
            assert peer.counted("transport_refused", reason="checksum") == 1
            await writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)
            assert bytes(memory.view) == bytes([1]) * 3 * MIB

    run(loop, scenario())
