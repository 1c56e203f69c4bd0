"""What a decision costs, on one core, with 144 nodes of 8 engines (48 prefill, 96 decode). Prints figures."""

from __future__ import annotations

import random
from collections import deque
from statistics import median
from time import process_time

import pytest

from common.types import Role
from services.scheduler.policy import (
    Action,
    EngineJoined,
    Event,
    Fetched,
    KvHandedOver,
    Load,
    Policy,
    PolicyConfig,
    PrefillEnded,
    RequestArrived,
    RequestEnded,
    check_integrity,
)

pytestmark = pytest.mark.benchmarks

ENGINES = 8
NODES = {Role.PREFILL: 48, Role.DECODE: 96}
TOKENS = 32_768
BLOCKS = TOKENS // 64
DEVICE_TOKENS = 32 * TOKENS


def name(role: Role, node: int, index: int) -> str:
    return f"{role}-{node}-{index}"


class Cluster:
    """Plays 1,152 engines, saturated: requests wait for the fetches of groups. Only what handle() takes is counted, in
    processor time."""

    def __init__(self, side: str, beta: int = 2 * TOKENS) -> None:
        self.policy = Policy(PolicyConfig(side, 40 * TOKENS, beta, 1 << 20, 64))
        self.random = random.Random(1)
        self.spent_s = 0.0
        self.arrived = 0
        self.prefilling: deque = deque()
        self.decoding: deque = deque()
        for role, nodes in NODES.items():
            for node in range(nodes):
                place = f"{role}@{node}"
                for index in range(ENGINES):
                    event = EngineJoined(name(role, node, index), role, place, place, 16 * BLOCKS, DEVICE_TOKENS)
                    self.policy.handle(event, 0.0)

    def tell(self, *events: Event) -> list[Action]:
        handle = self.policy.handle
        actions = []
        begin = process_time()
        for event in events:
            actions += handle(event, 0.0)
        self.spent_s += process_time() - begin
        return actions

    def follow(self, *events: Event) -> None:
        """All actions are starts."""
        self.prefilling += [action.key for action in self.tell(*events)]

    def arrivals(self, count: int) -> list[RequestArrived]:
        """Half to all of TOKENS, all but the last block and less in storage."""
        events = []
        for _ in range(count):
            self.arrived += 1
            tokens = self.random.randrange(TOKENS // 2, TOKENS)
            blocks = -(-tokens // 64)
            events.append(RequestArrived((f"r{self.arrived}", 0), tokens, 64 * (blocks - 1), blocks))
        return events

    def fetch(self, role: Role, node: int) -> Fetched:
        """What the engines of a node would say: exactly what they have, and that every read is done."""
        loads = []
        for index in range(ENGINES):
            engine = self.policy.engines[name(role, node, index)]
            taken = sum(request.num_tokens for request in engine.requests.values() if request.handed_over)
            loads.append(Load(engine.name, engine.assigned_seq, engine.assigned_tok, 0, 1e6, DEVICE_TOKENS - taken))
        return Fetched(tuple(loads))

    def end_some(self, running: int, decoding: int, count: int) -> None:
        """Requests beyond these numbers go on: prefilled and handed over, or ended."""
        while len(self.prefilling) > running:
            keys = [self.prefilling.popleft() for _ in range(min(count, len(self.prefilling) - running))]
            self.follow(*(event(key) for key in keys for event in (PrefillEnded, KvHandedOver)))
            self.decoding += keys
        while len(self.decoding) > decoding:
            keys = [self.decoding.popleft() for _ in range(min(count, len(self.decoding) - decoding))]
            self.follow(*(RequestEnded(key) for key in keys))


def lives(side: str, requests: int) -> float:
    """Requests a second, through their whole lives. One fetch of a group for 8 requests: one report a request."""
    cluster = Cluster(side)
    groups = [(role, node) for role in NODES for node in range(NODES[role])]
    for group in groups:
        cluster.follow(cluster.fetch(*group))
    turn = 0
    while cluster.arrived < requests:
        cluster.follow(*cluster.arrivals(64))
        for _ in range(8):
            cluster.follow(cluster.fetch(*groups[turn % len(groups)]))
            turn += 1
        cluster.end_some(running=600, decoding=3000, count=64)
    while cluster.prefilling or cluster.decoding:
        cluster.end_some(running=0, decoding=0, count=64)
    check_integrity(cluster.policy)
    assert not cluster.policy.requests
    return requests / cluster.spent_s


def fetch_of_100() -> float:
    """Seconds of a prefill group's fetch that assigns and starts 100 waiting requests."""
    cluster = Cluster("shorter_queue", beta=1 << 40)
    for node in range(NODES[Role.DECODE]):
        cluster.tell(cluster.fetch(Role.DECODE, node))
    assert cluster.tell(*cluster.arrivals(100)) == []
    cluster.spent_s = 0.0
    assert len(cluster.tell(cluster.fetch(Role.PREFILL, 0))) == 100
    return cluster.spent_s


@pytest.mark.parametrize("side", ["shorter_queue", "split", "pe_only"])
def test_requests_a_second(side: str) -> None:
    rates = [lives(side, 16_000) for _ in range(5)]
    print(f"\n{side}: {max(rates):,.0f} requests/s (best of {len(rates)}; median {median(rates):,.0f})")


def test_a_fetch_of_100() -> None:
    times = [fetch_of_100() for _ in range(30)]
    print(f"\na fetch that assigns 100: median {1e3 * median(times):.2f} ms, best {1e3 * min(times):.2f} ms")
