"""The parts of TTFT that a traffic manager measures, and the read queue that it reports, on a clock of the test's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from common.blocks.pool import SlotPool
from common.config import TimeoutsConfig
from common.messages import PeerStaged, ReadQueue, Ready, Stage
from common.metrics import Metrics
from common.transport.region import RegionDescriptor
from common.types import KEY_BYTES, ReadPath
from services.traffic_manager import requests as module
from services.traffic_manager.fence import Fence
from services.traffic_manager.requests import DecodeRequests, PrefillRequests
from services.traffic_manager.staging import SlotQueue
from services.traffic_manager.store import ReadOutcome
from services.traffic_manager.tier import Tier

REGION = RegionDescriptor(b"", 0, "", "", "")


class Bench:
    """One side's requests without a process: time, slots and reads are the test's. told: to the engine; sent: to the
    other side."""

    def __init__(self, monkeypatch, slots=8):
        self.now = 0.0
        self.told, self.sent, self.reads = [], [], []
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self.slots = SlotQueue(SlotPool(slots))
        self._common = (
            SimpleNamespace(endpoint="here", link=lambda control: SimpleNamespace(send=self.sent.append)),
            self.slots, self, 64, TimeoutsConfig(), Metrics(), Fence("", 1.0),
            lambda work, name: asyncio.create_task(work, name=name), self.told.append,
        )  # fmt: skip

    def prefill(self):
        return PrefillRequests(Tier(0), *self._common)

    def decode(self):
        return DecodeRequests(REGION, *self._common)

    async def read(self, request_id, path, keys, slots):
        done = asyncio.get_running_loop().create_future()
        self.reads.append((len(keys), slots, done))
        return ReadOutcome(await done)

    async def go(self, seconds=0.0):
        """Whatever can go on does; then time passes."""
        for _ in range(20):
            await asyncio.sleep(0)
        self.now += seconds


def stage(blocks, first, count, path=ReadPath.PE, name="r"):
    return Stage(name, 0, blocks, first, bytes(KEY_BYTES * count), path, "peer", "peer-1")


def peer_staged(first, tokens, allocation_s, read_s):
    return PeerStaged("r", 0, REGION, list(range(8)), first, tokens, "peer", allocation_s, read_s)


def the(kind, messages):
    (message,) = [message for message in messages if isinstance(message, kind)]
    return message


async def test_waiting_for_slots_is_allocation_and_reading_is_read(monkeypatch):
    bench = Bench(monkeypatch)
    requests = bench.prefill()
    held = await bench.slots.take(6, 1.0)
    requests.stage(stage(5, 0, 4))
    await bench.go(2.0)
    assert not bench.reads
    bench.slots.give_back(held)
    await bench.go(3.0)
    bench.reads[0][2].set_result(4)
    await bench.go()
    requests.peer_staged(peer_staged(4, 0, 9.0, 0.0))  # that side reads nothing: it does not count
    assert the(Ready, bench.told) == Ready("r", 0, 256, 2.0, 3.0)


@pytest.mark.parametrize(
    ("own_read_s", "peer", "expected"),
    [
        (3.0, (0.5, 1.0), (0.0, 3.0)),
        (3.0, (0.5, 4.0), (0.5, 4.0)),
        (3.0, (2.5, 1.0), (2.5, 1.0)),  # later in all, though it read for less
    ],
)
async def test_of_a_split_read_the_slower_side_counts(monkeypatch, own_read_s, peer, expected):
    bench = Bench(monkeypatch)
    requests = bench.prefill()
    requests.peer_staged(peer_staged(2, 3 * 64, *peer))
    requests.stage(stage(2, 0, 2, ReadPath.SPLIT))
    await bench.go(own_read_s)
    bench.reads[0][2].set_result(2)
    await bench.go()
    assert the(Ready, bench.told) == Ready("r", 0, 5 * 64, *expected)


@pytest.mark.parametrize(
    ("own", "theirs", "cached"),
    [(2, 3, 5), (1, 3, 1), (0, 3, 0), (2, 1, 3), (2, 0, 2)],
)
async def test_hits_of_a_split_read_end_at_the_first_that_is_missing(monkeypatch, own, theirs, cached):
    bench = Bench(monkeypatch)
    requests = bench.prefill()
    requests.stage(stage(2, 0, 2, ReadPath.SPLIT))
    await bench.go()
    bench.reads[0][2].set_result(own)
    await bench.go()
    requests.peer_staged(peer_staged(2, theirs * 64, 0.0, 1.0))
    assert the(Ready, bench.told).cached_tokens == cached * 64


async def test_the_decode_side_tells_its_own(monkeypatch):
    """It reads into the slots of the blocks that it reads, behind those of the prefill side's."""
    bench = Bench(monkeypatch)
    bench.decode().stage(stage(6, 2, 3, ReadPath.SPLIT))
    await bench.go(1.5)
    blocks, slots, done = bench.reads[0]
    assert (blocks, slots) == (3, [2, 3, 4])
    done.set_result(2)
    await bench.go()
    told = the(PeerStaged, bench.sent)
    assert (told.first, told.cached_tokens, told.allocation_s, told.read_s) == (2, 128, 0.0, 1.5)


async def test_the_read_queue_and_its_rate(monkeypatch):
    bench = Bench(monkeypatch, slots=4)
    requests = bench.prefill()
    for name in "ab":
        requests.stage(stage(3, 0, 2, name=name))
    await bench.go(4.0)
    assert len(bench.reads) == 1  # the other waits for slots
    bench.reads[0][2].set_result(2)
    await bench.go()
    queue = [message for message in bench.told if isinstance(message, ReadQueue)]
    assert [message.tokens for message in queue] == [128, 256, 128]
    assert [message.rate for message in queue] == [0, 0, pytest.approx(128 / 4, rel=0.3)]
