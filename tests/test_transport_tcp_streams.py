"""The streams of the tcp transport: addresses, how many there are, the traffic classes in which they ride."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import psutil
import pytest

from common.config import NetworkConfig
from common.errors import ConfigError
from common.faults import Faults
from common.metrics import Metrics
from common.transport.base import Batch, Intent, make_runs
from common.transport.classes import CLASS_OF_INTENT, COLLECTIVE, TRAFFIC_CLASSES, mark
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.transport.sockets import do_not_pace_loopback
from tests.transport_support import MIB, done, each_loop, end, noise, pair, run

SIZE = 4096


@each_loop
def test_ipv6(loop: str) -> None:
    async def scenario() -> None:
        async with pair("tcp", host="::1") as (writer, peer):
            source, _ = writer.region(3 * MIB, noise(3 * MIB))
            target, memory = peer.region(3 * MIB)
            assert target.address.startswith("[::1]:")
            await writer.copy(source, target)
            assert bytes(memory.view) == noise(3 * MIB).tobytes()

    run(loop, scenario())


def test_an_address_that_is_not_ours_is_a_clear_error() -> None:
    async def scenario() -> None:
        for host in ("192.0.2.1", "no.such.host.invalid", "0.0.0.0", "::"):
            transport = open_transport(NetworkConfig(transport="tcp"), host, Metrics(), Faults([], "test"), 1.0)
            with pytest.raises(ConfigError, match=re.escape(repr(host))):
                await transport.start()
            await transport.close()

    run("uvloop", scenario())


def test_the_listener_binds_its_own_address_only() -> None:
    async def scenario() -> None:
        async with end("tcp") as peer:
            region, _ = peer.region(SIZE)
            listening = [
                connection.laddr
                for connection in psutil.Process().net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert [f"{address.ip}:{address.port}" for address in listening] == [region.address]

    run("uvloop", scenario())


# ---- traffic classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_sockets_carry_their_class(family: socket.AddressFamily) -> None:
    level, option = (
        (socket.IPPROTO_IP, socket.IP_TOS) if family == socket.AF_INET else (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    )
    for traffic_class in TRAFFIC_CLASSES:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            mark(sock, traffic_class)
            assert sock.getsockopt(level, option) >> 2 == traffic_class.dscp
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == traffic_class.priority


def test_model_collectives_go_before_all_kv() -> None:
    assert set(CLASS_OF_INTENT) == set(Intent)
    kv = {CLASS_OF_INTENT[intent] for intent in Intent if intent is not Intent.MODEL_COLLECTIVE}
    assert CLASS_OF_INTENT[Intent.MODEL_COLLECTIVE] is COLLECTIVE and COLLECTIVE not in kv
    assert all(low.dscp == 8 and low.priority < COLLECTIVE.priority for low in kv)


def test_transfers_side_by_side_take_several_streams_and_one_alone_takes_one() -> None:
    async def scenario() -> None:
        network = NetworkConfig(transport="tcp", tcp_streams=3)
        several = open_transport(network, "127.0.0.1", Metrics(), Faults([], "test"), 20.0)
        await several.start()
        async with end("tcp") as peer:
            target, memory = peer.region(8 * MIB)
            own = Memory.create("several", 8 * MIB)
            own.view[:] = noise(8 * MIB).data
            source = several.register(own)
            for _ in range(3):
                await several.write(Batch(source, target, make_runs(0, 0, MIB)), Intent.KV_LOAD)
            assert num_streams(target) == 1
            parts = [make_runs(index * MIB, index * MIB, MIB) for index in range(8)]
            await asyncio.gather(*(done(several.write(Batch(source, target, runs), Intent.KV_LOAD)) for runs in parts))
            assert num_streams(target) == 3
            assert bytes(memory.view) == bytes(own.view)
            await several.close()
            own.close()

    run("uvloop", scenario())


def num_streams(target: RegionDescriptor) -> int:
    """Connections to the region's listener."""
    port = int(target.address.rpartition(":")[2])
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections("tcp"))


def test_both_directions_of_a_stream_ride_in_the_class_of_the_intent() -> None:
    async def scenario() -> None:
        async with pair("tcp") as (writer, peer):
            source, _ = writer.region(SIZE)
            target, _ = peer.region(SIZE)
            await asyncio.gather(*(done(writer.copy(source, target, intent)) for intent in Intent))
            with sockets(target) as both:
                seen = [sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2 for sock in both]
            assert sorted(seen) == [8, 8, 8, 8, 46, 46]

    run("uvloop", scenario())


@contextmanager
def sockets(target: RegionDescriptor) -> Iterator[list[socket.socket]]:
    """Both ends of every connection to the region's listener."""
    port = int(target.address.rpartition(":")[2])
    with ExitStack() as opened:
        yield [
            opened.enter_context(socket.socket(fileno=os.dup(connection.fd)))
            for connection in psutil.Process().net_connections("tcp")
            if connection.raddr and port in (connection.laddr.port, connection.raddr.port)
        ]


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nothing_is_paced_on_a_loopback(host: str) -> None:
    async def scenario() -> None:
        async with pair("tcp", host=host) as (writer, peer):
            source, _ = writer.region(SIZE)
            target, _ = peer.region(SIZE)
            await writer.copy(source, target)
            with sockets(target) as both:
                assert [congestion_control(sock) for sock in both] == [b"reno", b"reno"]

    run("uvloop", scenario())


def test_elsewhere_the_systems_congestion_control_is_left_alone() -> None:
    with socket.socket() as sock:
        chosen = congestion_control(sock)
        do_not_pace_loopback(sock, "192.0.2.1")
        assert congestion_control(sock) == chosen


def test_zero_length_runs_do_not_travel() -> None:
    async def scenario() -> None:
        async with pair("tcp") as (writer, peer):
            source, _ = writer.region(SIZE, 9)
            target, memory = peer.region(SIZE)
            runs = np.array([[0, 0, 0], [0, 5, 1], [7, 7, 0]], dtype=np.int64)
            await writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)
            assert bytes(memory.view[:8]) == bytes([0, 0, 0, 0, 0, 9, 0, 0])

    run("uvloop", scenario())
