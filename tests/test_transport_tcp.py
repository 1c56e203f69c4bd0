"""The tcp transport against peers that send rubbish, stall, lie or vanish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from common.transport.base import Intent, TransferError
from common.transport.classes import TRAFFIC_CLASSES
from common.transport.region import RegionDescriptor
from common.transport.tcp_frames import ACK, HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_RUNS, Header, Status
from tests.transport_support import MIB, each_loop, end, noise, pair, run

SIZE = 4096


def frame(
    region: RegionDescriptor,
    runs: list[tuple[int, int]] | None = None,
    payload: bytes = b"x" * 100,
    change: Callable[[dict[str, int | bytes]], None] = lambda fields: None,
) -> bytes:
    """A frame that is sound but for what change() does to its header's fields."""
    table = b"".join(struct.pack("<QQ", *run) for run in (runs if runs is not None else [(0, len(payload))]))
    fields: dict[str, int | bytes] = {
        "traffic_class": 1,
        "key": region.key,
        "transfer": 5,
        "num_runs": len(table) // 16,
        "num_bytes": len(payload),
        "table_checksum": xxh3_64_intdigest(table),
    }
    change(fields)
    checksum = struct.pack("<Q", xxh3_64_intdigest(payload))
    return Header(**fields).pack() + table + payload + checksum  # type: ignore[arg-type]


def changed(**fields: int | bytes) -> Callable[[dict[str, int | bytes]], None]:
    return lambda header: header.update(fields)


async def exchange(region: RegionDescriptor, data: bytes, hang_up: bool = True) -> bytes:
    """Send raw bytes to the region's listener; what it answers until it closes."""
    host, _, port = region.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(data)
        if hang_up:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    except TimeoutError:
        raise
    except OSError:
        return b""
    finally:
        writer.close()


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DROPPED: dict[str, Callable[[RegionDescriptor], bytes]] = {
    "garbage": lambda region: noise(100_000).tobytes(),
    "http": lambda region: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
    "nothing": lambda region: b"",
    "half a header": lambda region: frame(region)[: HEADER_BYTES // 2],
    "half a table": lambda region: frame(region)[: HEADER_BYTES + 8],
    "half a payload": lambda region: frame(region)[:-58],
    "half a checksum": lambda region: frame(region)[:-4],
    "bad magic": lambda region: flip(frame(region), 0),
    "other version": lambda region: flip(frame(region), 4),
    "flipped key": lambda region: flip(frame(region), 10),
    "flipped header checksum": lambda region: flip(frame(region), HEADER_BYTES - 1),
    "flipped run table": lambda region: flip(frame(region), HEADER_BYTES + 1),
    "no runs": lambda region: frame(region, [], b""),
    "huge lengths": lambda region: frame(region, change=changed(num_runs=0xFFFFFFFF, num_bytes=0xFFFFFFFF)),
    "oversize": lambda region: frame(region, change=changed(num_bytes=MAX_PAYLOAD_BYTES + 1)),
    "too many runs": lambda region: frame(region, [(0, 1)] * (MAX_RUNS + 1), b"x" * (MAX_RUNS + 1)),
    "payload too long for its runs": lambda region: frame(region, [(0, 50)]),
    "negative length": lambda region: frame(region, [(0, 2**64 - 100), (0, 200)]),
    "length that wraps": lambda region: frame(region, [(0, 2**63), (0, 2**63 + 100)]),
    "unknown traffic class": lambda region: frame(region, change=changed(traffic_class=len(TRAFFIC_CLASSES))),
}

REFUSED: dict[str, tuple[Status, Callable[[RegionDescriptor], bytes]]] = {
    "unknown key": (Status.UNKNOWN_REGION, lambda region: frame(region, change=changed(key=os.urandom(16)))),
    "zero key": (Status.UNKNOWN_REGION, lambda region: frame(region, change=changed(key=bytes(16)))),
    "past the end": (Status.OUT_OF_RANGE, lambda region: frame(region, [(SIZE - 99, 100)])),
    "second run past the end": (Status.OUT_OF_RANGE, lambda region: frame(region, [(0, 50), (SIZE, 50)])),
    "longer than the region": (Status.OUT_OF_RANGE, lambda region: frame(region, payload=b"x" * (SIZE + 1))),
    "offset that overflows": (Status.OUT_OF_RANGE, lambda region: frame(region, [(2**63 - 50, 100)])),
    "negative offset": (Status.OUT_OF_RANGE, lambda region: frame(region, [(2**64 - 50, 100)])),
}


@each_loop
@pytest.mark.parametrize("name", DROPPED)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(loop: str, name: str) -> None:
    async def scenario() -> None:
        async with pair("tcp") as (writer, peer):
            region, memory = peer.region(SIZE)
            assert await exchange(region, DROPPED[name](region)) == b""
            arrived = {"half a payload": 50, "half a checksum": 100}.get(name, 0)
            assert bytes(memory.view).rstrip(b"\0") == b"x" * arrived
            source, _ = writer.region(SIZE, 9)
            await writer.copy(source, region)
            assert bytes(memory.view) == bytes([9]) * SIZE

    run(loop, scenario())


@each_loop
@pytest.mark.parametrize("name", REFUSED)
def test_a_frame_that_may_not_be_written_is_refused_and_the_stream_goes_on(loop: str, name: str) -> None:
    status, build = REFUSED[name]

    async def scenario() -> None:
        async with end("tcp") as peer:
            region, memory = peer.region(SIZE)
            answers = await exchange(region, build(region) + frame(region, [(8, 50), (4000, 50)]))
            assert list(ACK.iter_unpack(answers)) == [(5, status), (5, Status.OK)]
            assert bytes(memory.view) == bytes(8) + b"x" * 50 + bytes(3942) + b"x" * 50 + bytes(46)
            assert peer.counted("transport_refused", reason=status.name.lower()) == 1

    run(loop, scenario())


def test_answers_come_in_the_order_of_the_frames() -> None:
    """Good and bad, short and long, of one transfer or of several: one for each, in the order in which they came."""

    async def scenario() -> None:
        async with end("tcp") as peer:
            region, _ = peer.region(MIB)
            chance = np.random.default_rng(5)
            frames, expected = [], []
            for transfer in chance.integers(0, 8, 60).tolist():
                payload, good = noise(int(chance.choice([1, 5000, 300_000]))).tobytes(), bool(chance.random() < 0.7)
                start = 0 if good else MIB
                frames.append(frame(region, [(start, len(payload))], payload, changed(transfer=transfer)))
                expected.append((transfer, Status.OK if good else Status.OUT_OF_RANGE))
            answers = await exchange(region, b"".join(frames))
            assert list(ACK.iter_unpack(answers)) == expected

    run("uvloop", scenario())


def test_a_wrong_payload_checksum_is_reported_and_stays_within_its_slices() -> None:
    async def scenario() -> None:
        async with end("tcp") as peer:
            region, memory = peer.region(SIZE, 1)
            answers = await exchange(region, flip(frame(region, [(100, 100)]), HEADER_BYTES + 16 + 3))
            assert list(ACK.iter_unpack(answers)) == [(5, Status.CHECKSUM)]
            assert set(memory.view[:100]) == set(memory.view[200:]) == {1}

    run("uvloop", scenario())


@each_loop
def test_a_region_withdrawn_in_mid_frame_gets_no_byte_more(loop: str) -> None:
    async def scenario() -> None:
        async with end("tcp") as peer:
            region, memory = peer.region(SIZE)
            data = frame(region, [(0, 2000)], b"x" * 2000)
            host, _, port = region.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data[:-1008])
            while not memory.view[999]:
                await asyncio.sleep(0.001)
            await peer.transport.deregister(region)
            writer.write(data[-1008:])
            assert ACK.unpack(await reader.readexactly(ACK.size)) == (5, Status.UNKNOWN_REGION)
            assert bytes(memory.view) == b"x" * 1000 + bytes(SIZE - 1000)
            writer.close()

    run(loop, scenario())


@each_loop
def test_a_frame_of_many_short_runs_is_written_whole_or_not_at_all(loop: str) -> None:
    """Withdrawn in mid-frame, cut off in mid-frame, or damaged: not a byte of it. Then the same frame in good order."""
    runs, payload = [(index * 90, 50) for index in range(100)], noise(5000).tobytes()

    async def scenario() -> None:
        async with end("tcp") as peer:
            region, memory = peer.region(9000)
            data = frame(region, runs, payload)
            assert await exchange(region, data[:-10]) == b""
            assert ACK.unpack(await exchange(region, data[:-1] + bytes([data[-1] ^ 1]))) == (5, Status.CHECKSUM)
            host, _, port = region.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data[:-1000])
            await asyncio.sleep(0.02)
            await peer.transport.deregister(region)
            writer.write(data[-1000:])
            assert ACK.unpack(await reader.readexactly(ACK.size)) == (5, Status.UNKNOWN_REGION)
            writer.close()
            assert not any(memory.view)
            again = peer.transport.register(memory)
            assert ACK.unpack(await exchange(again, frame(again, runs, payload))) == (5, Status.OK)
            rows = np.frombuffer(bytes(memory.view), np.uint8).reshape(100, 90)
            assert rows[:, :50].tobytes() == payload and not rows[:, 50:].any()

    run(loop, scenario())


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, HEADER_BYTES + 16 - 1), bit=st.integers(0, 7), cut=st.integers(0, 300))
def test_no_flipped_bit_or_cut_reaches_memory_outside_the_runs(at: int, bit: int, cut: int) -> None:
    async def scenario() -> None:
        async with end("tcp") as peer:
            region, memory = peer.region(SIZE)
            data = bytearray(frame(region, [(1000, 100)]))
            data[at] ^= 1 << bit
            assert await exchange(region, bytes(data)[: len(data) - cut]) == b""
            assert not any(memory.view)

    run("asyncio", scenario())


@each_loop
def test_d16_hostile_peers_cost_no_memory(loop: str) -> None:
    """Lengths of 0xFFFFFFFF and a flood of bytes: connection dropped, RSS within 16 MiB, service alive."""

    async def scenario() -> None:
        async with pair("tcp") as (writer, peer):
            region, memory = peer.region(SIZE)
            greedy = frame(region, change=changed(num_runs=0xFFFFFFFF, num_bytes=0xFFFFFFFF))
            unknown = frame(region, payload=bytes(MIB), change=changed(key=os.urandom(16)))
            await exchange(region, greedy)
            before = psutil.Process().memory_info().rss
            for _ in range(20):
                await asyncio.gather(*(exchange(region, greedy) for _ in range(10)))
                await exchange(region, unknown * 4)
            assert psutil.Process().memory_info().rss - before < 16 * MIB
            source, _ = writer.region(SIZE, 9)
            await writer.copy(source, region)
            assert bytes(memory.view) == bytes([9]) * SIZE

    run(loop, scenario())


@each_loop
@pytest.mark.parametrize("sent", [0, 10, HEADER_BYTES + 4, HEADER_BYTES + 16 + 30])
def test_a_peer_that_stalls_is_dropped_in_time(loop: str, sent: int) -> None:
    async def scenario() -> None:
        async with end("tcp", transfer_s=0.2) as peer:
            region, _ = peer.region(SIZE)
            assert await exchange(region, frame(region)[:sent], hang_up=False) == b""
            assert peer.counted("transport_refused", reason="late") == 1

    run(loop, scenario())


def test_an_idle_stream_is_kept() -> None:
    async def scenario() -> None:
        async with pair("tcp", transfer_s=0.2) as (writer, peer):
            region, _ = peer.region(SIZE)
            source, _ = writer.region(SIZE, 9)
            await writer.write(source, region, (0, 0, 1))
            descriptors = len(os.listdir("/proc/self/fd"))
            await asyncio.sleep(0.5)
            await writer.copy(source, region)
            assert len(os.listdir("/proc/self/fd")) == descriptors
            assert peer.counted("transport_refused", reason="late") == 0

    run("uvloop", scenario())


@each_loop
@pytest.mark.parametrize(
    ("size", "answer", "connections"),
    [
        pytest.param(10, b"", 2, id="silent"),
        pytest.param(32 * MIB, b"", 2, id="silent, many frames"),
        pytest.param(10, ACK.pack(99, Status.OK), 2, id="another transfer"),
        pytest.param(10, ACK.pack(0, 77), 1, id="unknown status"),
        pytest.param(32 * MIB, ACK.pack(0, Status.OK) * 40, 2, id="too many"),
    ],
)
def test_a_listener_that_lies_or_stalls_fails_the_transfer(
    loop: str, size: int, answer: bytes, connections: int
) -> None:
    """Only the acknowledgement of what was sent is success; a deadline ends the waiting, and the next try is new."""

    async def scenario() -> None:
        answered = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answered
            answered += 1
            await reader.readexactly(HEADER_BYTES + 16 + 10)
            writer.write(answer)
            with contextlib.suppress(ConnectionError):
                while await reader.read(MIB):
                    pass
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with end("tcp", transfer_s=0.3) as writer:
            source, _ = writer.region(size, 9)
            host, port = server.sockets[0].getsockname()
            target = RegionDescriptor(bytes(16), size, "elsewhere", "", f"{host}:{port}")
            for _ in range(2):
                with pytest.raises(TransferError):
                    await writer.copy(source, target)
            assert answered == connections
        server.close()
        await asyncio.sleep(0.05)

    run(loop, scenario())


@each_loop
def test_a_reset_right_behind_an_answer_is_noticed(loop: str) -> None:
    """A loop may tell of both at once, and not again."""

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with end("tcp", transfer_s=30.0) as writer:
            source, _ = writer.region(10, 9)
            host, port = listener.getsockname()
            target = RegionDescriptor(bytes(16), 10, "elsewhere", "", f"{host}:{port}")
            first, second = writer.copy(source, target), writer.copy(source, target)
            peer, _ = await asyncio.to_thread(listener.accept)
            await asyncio.to_thread(peer.recv, 2 * (HEADER_BYTES + 16 + 10 + 8), socket.MSG_WAITALL)
            peer.sendall(ACK.pack(0, Status.OK))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            async with asyncio.timeout(10):
                await first
                with pytest.raises(TransferError, match="reset"):
                    await second
        listener.close()

    run(loop, scenario())


@each_loop
def test_a_deadline_ends_only_what_has_begun_on_a_dead_stream(loop: str) -> None:
    """A peer that accepts and never reads: transfers of every class fail at their own deadlines, cancel() returns."""

    async def scenario() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        async with end("tcp", transfer_s=0.4) as writer:
            source, _ = writer.region(32 * MIB)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            target = RegionDescriptor(bytes(16), 32 * MIB, "elsewhere", "", address)
            transfers = [writer.copy(source, target, intent) for intent in Intent]
            begun = asyncio.get_running_loop().time()
            await asyncio.sleep(0.1)
            await transfers[0].cancel()
            for transfer in transfers:
                with pytest.raises(TransferError):
                    await transfer
            assert asyncio.get_running_loop().time() - begun < 5
        silent.close()

    run(loop, scenario())
