"""The verbs transport on RDMA devices: what the contract (test_transport_*) that all transports share leaves out."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.config import NetworkConfig
from common.errors import ConfigError
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, TransferError, make_runs
from common.transport.classes import COLLECTIVE, KV
from common.transport.endpoint import Endpoint
from common.transport.memory import Memory
from common.transport.select import open_transport
from common.transport.verbs.mover import VerbsMover
from tests.rdma_support import ends, needs_rdma
from tests.transport_support import LOOPS, MIB, End, end, noise, pair, run

pytestmark = needs_rdma
each_loop = pytest.mark.parametrize("loop", LOOPS)


def _mover(one: End) -> VerbsMover:
    assert isinstance(one.transport, Endpoint)
    return next(mover for mover in one.transport._remote if isinstance(mover, VerbsMover))


@asynccontextmanager
async def _end(address: str, kind: str = "verbs", **rdma: Any) -> AsyncIterator[End]:
    """One with RDMA settings."""
    metrics = Metrics()
    network = NetworkConfig.model_validate({"transport": kind, "rdma": rdma})
    one = End(open_transport(network, address, metrics, Faults([], "test"), 5.0), metrics)
    await one.transport.start()
    try:
        yield one
    finally:
        await one.transport.close()
        for memory in one.memories:
            memory.close()


# ---- work requests, notices, classes ---------------------------------------------------------------------------------


def test_writes_go_out_in_lists_of_64_with_a_notice_each() -> None:
    """One doorbell and one notice a list; the receiver counts what the writer has posted."""

    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            data = noise(300 * 1000)
            source, _ = writer.region(300 * 1000, data)
            target, memory = peer.region(300 * 1000)
            order = np.random.default_rng(1).permutation(300)
            runs = make_runs(order * 1000, np.arange(300) * 1000, 1000)
            await writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)
            assert bytes(memory.view) == data.reshape(300, 1000)[order].tobytes()
            assert writer.counted("rdma_writes", traffic_class="kv") == len(runs)
            lists = -(-len(runs) // 64)
            assert writer.counted("rdma_doorbells", traffic_class="kv") == lists
            assert peer.metrics.snapshot()["transport_notices_total"] == lists

    run("uvloop", scenario())


@pytest.mark.parametrize("length", [1, 219, 220, 221, 4096])
def test_short_writes_travel_in_their_requests(length: int) -> None:
    """Inline or not, and back and forth: a source that changes after the transfer is not seen by it."""

    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, from_memory = writer.region(MIB, noise(MIB))
            target, memory = peer.region(MIB)
            for start in (0, 5000):
                await writer.write(source, target, (start, start, length), (start + 4096, start + 4096, 1))
                await writer.write(source, target, (20_000, 20_000, 60_000))
                assert memory.view[start : start + length] == from_memory.view[start : start + length]
                assert memory.view[start + 4096] == from_memory.view[start + 4096]
                assert memory.view[20_000:80_000] == from_memory.view[20_000:80_000]

    run("asyncio", scenario())


def test_each_class_has_a_queue_pair_that_carries_its_marks() -> None:
    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            for intent in (Intent.MODEL_COLLECTIVE, Intent.KV_LOAD, Intent.PD_HANDOFF):
                await writer.copy(source, target, intent)
            connections = _mover(writer)._connections
            assert {traffic_class for _, traffic_class in connections} == {COLLECTIVE, KV}
            from pyverbs.enums import IBV_QP_AV

            for (_, traffic_class), connection in connections.items():
                assert connection._pair is not None
                attributes, _ = connection._pair._pair.query(IBV_QP_AV)
                assert attributes.ah_attr.traffic_class == traffic_class.dscp << 2
            for name in ("collective", "kv"):
                assert writer.counted("rdma_doorbells", traffic_class=name) > 0

    run("uvloop", scenario())


@each_loop
@pytest.mark.parametrize("setting", ["spin", "loopback"])
def test_settings(loop: str, setting: str) -> None:
    """Polling instead of events; and the NIC copies between regions of one process, too."""

    async def scenario() -> None:
        own, other = ends("verbs")
        async with _end(own, **{setting: True}) as writer, _end(other, **{setting: True}) as peer:
            source, _ = writer.region(3 * MIB, noise(3 * MIB))
            remote, memory = peer.region(3 * MIB)
            local, own_memory = writer.region(3 * MIB)
            await asyncio.gather(*(_await(writer.copy(source, target)) for target in (remote, local)))
            assert bytes(memory.view) == bytes(own_memory.view) == noise(3 * MIB).tobytes()
            way = "loopback" if setting == "loopback" else "local"
            assert writer.counted("transport_bytes", intent="kv_load", transport=way) == 3 * MIB
            assert writer.counted("transport_bytes", intent="kv_load", transport="verbs") == 3 * MIB

    run(loop, scenario())


async def _await(transfer: Any) -> None:
    await transfer


def test_an_idle_transport_does_not_poll() -> None:
    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            await writer.copy(source, target)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            await asyncio.sleep(1.0)
            wakeups = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
            assert loop.time() - begun >= 1.0 and wakeups < 50, wakeups

    run("uvloop", scenario())


def test_memory_is_pinned_once_however_often_it_is_registered() -> None:
    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(MIB, 1)
            target, memory = peer.region(MIB)
            again = peer.transport.register(memory)
            mover = _mover(peer)
            assert len(mover._memories) == 1 and len(mover._registrations) == 2
            await peer.transport.deregister(target)
            with pytest.raises(TransferError):
                await writer.copy(source, target)
            await writer.copy(source, again)
            assert memory.view[-1] == 1
            await peer.transport.deregister(again)
            assert not mover._memories and not mover._registrations

    run("uvloop", scenario())


def test_the_event_loop_goes_on_while_memory_is_pinned() -> None:
    """And register() has nothing left to do then."""

    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            memory = Memory.create("large", 256 * MIB)
            peer.memories.append(memory)
            ticks, pinning = 0, asyncio.create_task(peer.transport.pin(memory))
            while not pinning.done():
                await asyncio.sleep(0.001)
                ticks += 1
            await pinning
            assert ticks > 10
            mover = _mover(peer)
            pinned = mover._memories[memory]
            target = peer.transport.register(memory)
            assert mover._registrations[target.key] is pinned
            source, _ = writer.region(MIB, noise(MIB))
            await writer.copy(source, target)
            assert memory.view[:MIB] == noise(MIB).data and not any(memory.view[MIB : 2 * MIB])

    run("uvloop", scenario())


def test_a_transport_that_is_closed_while_it_pins_memory_lets_go_of_it() -> None:
    async def scenario() -> None:
        async with pair("verbs") as (_, peer):
            memory = Memory.create("large", 64 * MIB)
            peer.memories.append(memory)
            pinning = asyncio.create_task(peer.transport.pin(memory))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await peer.transport.close()
            await pinning
            assert not _mover(peer)._memories

    run("asyncio", scenario())


# ---- what is withdrawn, cut off, refused -----------------------------------------------------------------------------


def test_the_nic_refuses_what_the_owner_never_gave_and_the_next_transfer_goes_through() -> None:
    """A key of the NIC's that is wrong, and an address out of the region: memory stays intact."""

    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(4096, 1)
            target, memory = peer.region(4096)
            registration = _mover(peer)._registrations[target.key]
            for attribute, wrong in (
                ("rkey", registration.rkey ^ 0x5500),
                ("address", registration.address + (1 << 30)),
            ):
                right = getattr(registration, attribute)
                setattr(registration, attribute, wrong)
                with pytest.raises(TransferError):
                    await writer.copy(source, target)
                setattr(registration, attribute, right)
                assert not any(memory.view)
            await writer.copy(source, target)
            assert bytes(memory.view) == bytes([1]) * 4096

    run("asyncio", scenario())


def test_a_notice_out_of_turn_ends_the_connection() -> None:
    """It is no success, and the next transfer goes through."""

    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(MIB, noise(MIB))
            target, memory = peer.region(MIB)
            await writer.copy(source, target)
            (connection,) = _mover(writer)._connections.values()
            assert connection._window is not None
            connection._window.post()  # a number that is never sent
            with pytest.raises(TransferError):
                await writer.copy(source, target)
            memory.view[:] = bytes(MIB)
            await writer.copy(source, target)
            assert bytes(memory.view) == noise(MIB).tobytes()

    run("uvloop", scenario())


def test_a_transport_that_has_the_address_of_another_is_not_mistaken_for_it() -> None:
    async def scenario() -> None:
        async with pair("verbs") as (writer, peer):
            source, _ = writer.region(100, 1)
            target, memory = peer.region(100)
            address = target.verbs.partition("/")[0]
            with pytest.raises(TransferError, match="another one by now"):
                await writer.copy(source, replace(target, verbs=f"{address}/0011223344556677"))
            assert peer.counted("transport_refused", reason="handshake") == 1
            assert not any(memory.view)

    run("uvloop", scenario())


def test_mismatched_mtu_is_refused_with_the_fix() -> None:
    async def scenario() -> None:
        own, other = ends("verbs")
        async with _end(own, mtu=1024) as writer, _end(other) as peer:
            source, _ = writer.region(100, 1)
            target, _ = peer.region(100)
            with pytest.raises(TransferError, match=r"4096, yours is 1024: .* set network.rdma.mtu to 1024 on both"):
                await writer.copy(source, target)
        async with _end(own, mtu=1024) as writer, _end(other, mtu=1024) as peer:
            source, _ = writer.region(MIB, noise(MIB))
            target, memory = peer.region(MIB)
            await writer.copy(source, target)
            assert bytes(memory.view) == noise(MIB).tobytes()

    run("uvloop", scenario())


@pytest.mark.parametrize(
    ("nic", "rdma", "fix"),
    [
        ("127.0.0.1", {}, "no RDMA device has the address 127.0.0.1: set snic and cnic of network to rxe_a0:1"),
        ("rxe_none", {}, "there is no RDMA device rxe_none: set"),
        (None, {"gid_index": 200}, "gid_index 200 does not exist"),
    ],
)
async def test_an_interface_that_cannot_be_had(nic: str | None, rdma: dict[str, Any], fix: str) -> None:
    """verbs is refused with the fix; auto falls back to tcp."""
    address = nic or ends("verbs")[0]
    with pytest.raises(ConfigError, match=fix):
        async with _end(address, **rdma):
            pass
    if nic == "rxe_none":
        return
    async with _end(address, kind="auto", **rdma) as one:
        region, _ = one.region(10)
        assert region.address and not region.verbs
        assert any(name.startswith("rdma_fallback") for name in one.metrics.snapshot())


def test_auto_takes_rdma_to_other_hosts() -> None:
    async def scenario() -> None:
        own, other = ends("verbs")
        async with end("auto", own) as writer, end("auto", other) as peer:
            source, _ = writer.region(MIB, noise(MIB))
            target, memory = peer.region(MIB)
            await writer.copy(source, replace(target, host="elsewhere"))
            assert bytes(memory.view) == noise(MIB).tobytes()
            assert writer.counted("transport_bytes", intent="kv_load", transport="verbs") == MIB
            await writer.copy(source, replace(target, host="elsewhere", verbs=""))
            assert writer.counted("transport_bytes", intent="kv_load", transport="tcp") == MIB

    run("uvloop", scenario())
