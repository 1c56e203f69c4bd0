"""Turns of the event loop that one stream of the tcp transport takes, whatever its peer sends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator

import pytest

from common.transport.region import RegionDescriptor
from common.transport.tcp_frames import ACK, MAX_PAYLOAD_BYTES, TURN_BYTES, Header, Status
from common.transport.tcp_receiver import DISCARD_BYTES, FRAME_COST, Stream
from tests.test_transport_tcp import SIZE, changed, exchange, frame
from tests.transport_support import each_loop, end, run


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a turn, for the tests to count in."""
    counts: list[int] = []
    take = Stream._on_readable

    def turn(stream: Stream) -> None:
        counts.append(0)
        take(stream)

    monkeypatch.setattr(Stream, "_on_readable", turn)
    return counts


@each_loop
@pytest.mark.parametrize("known", [True, False])
def test_a_flood_of_small_frames(loop: str, known: bool, turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = Header.unpack

    def taken(raw: memoryview) -> Header:
        turns[-1] += 1
        return unpack(raw)

    async def scenario() -> None:
        async with end("tcp") as peer:
            region, _ = peer.region(SIZE)
            small = frame(region, payload=b"x", change=changed() if known else changed(key=bytes(16)))
            assert len(await exchange(region, small * 1000)) == 1000 * ACK.size

    monkeypatch.setattr(Header, "unpack", taken)
    run(loop, scenario())
    assert sum(turns) == 1000 and max(turns) <= TURN_BYTES // FRAME_COST


@each_loop
def test_a_large_frame_that_is_refused(loop: str, turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Stream._fill

    def filled(stream: Stream, place: memoryview) -> Generator[int, None, None]:
        yield from fill(stream, place)
        turns[-1] += len(place)

    async def scenario() -> None:
        async with end("tcp") as peer:
            region, _ = peer.region(SIZE)
            large = frame(region, payload=bytes(MAX_PAYLOAD_BYTES), change=changed(key=bytes(16)))
            await asyncio.to_thread(send, region, large)

    def send(region: RegionDescriptor, data: bytes) -> None:
        host, _, port = region.address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(data)
            assert ACK.unpack(sock.recv(ACK.size)) == (5, Status.UNKNOWN_REGION)

    monkeypatch.setattr("common.transport.tcp_receiver.TURN_BYTES", 1 << 18)
    monkeypatch.setattr(Stream, "_fill", filled)
    run(loop, scenario())
    assert sum(turns) > MAX_PAYLOAD_BYTES and max(turns) <= (1 << 18) + DISCARD_BYTES
