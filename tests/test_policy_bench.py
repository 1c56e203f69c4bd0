"""What a decision costs, on one core, in a cluster of 144 nodes of 8 engines (48 prefill, 96 decode). Prints figures."""

from __future__ import annotations

import gc
import random
from collections import deque
from statistics import median
from time import process_time

import pytest

from common.types import Role
from services.scheduler.policy import (
    EngineJoined,
    Fetched,
    KvHandedOver,
    Load,
    Policy,
    PolicyConfig,
    PrefillEnded,
    RequestArrived,
    RequestEnded,
    Start,
    check_integrity,
)

pytestmark = pytest.mark.benchmarks

GPUS = 8
NODES = {Role.PREFILL: 48, Role.DECODE: 96}
TOKENS = 32_768
BLOCKS = TOKENS // 64


def cluster(side: str, beta: int) -> Policy:
    """Every engine has joined; none has fetched. A decode engine holds 32 prompts, its buffer 16."""
    policy = Policy(PolicyConfig(side, 40 * TOKENS, beta, 1 << 20, 64))
    for role, nodes in NODES.items():
        for node in range(nodes):
            for gpu in range(GPUS):
                name = f"{role}-{node}-{gpu}"
                event = EngineJoined(name, role, f"{role}@{node}", f"{role}@{node}", 16 * BLOCKS, 32 * (TOKENS + 64))
                policy.handle(event, 0.0)
    return policy


def report(policy: Policy, role: Role, node: int) -> Fetched:
    """What the engines of a node would say: exactly what they have."""
    loads = []
    for gpu in range(GPUS):
        engine = policy.engines[f"{role}-{node}-{gpu}"]
        handed = sum(request.num_tokens for request in engine.requests.values() if request.handed_over)
        loads.append(Load(engine.name, engine.assigned_seq, engine.assigned_tok, 0, 1e6, 32 * (TOKENS + 64) - handed))
    return Fetched(tuple(loads))


class Run:
    """Lives of requests: arrivals wait until a group fetches, as in a saturated cluster. Only handle() is timed."""

    def __init__(self, side: str) -> None:
        self.policy = cluster(side, beta=2 * TOKENS)
        self.random = random.Random(1)
        self.spent = 0.0
        self.events = 0
        self.arrived = 0
        self.fetches: list[tuple[int, float]] = []

    def handle(self, events: list) -> list:
        handle = self.policy.handle
        begin = process_time()
        actions = [action for event in events for action in handle(event, 0.0)]
        self.spent += process_time() - begin
        self.events += len(events)
        return actions

    def arrivals(self, count: int) -> list:
        events = []
        for _ in range(count):
            self.arrived += 1
            tokens = self.random.randrange(TOKENS // 2, TOKENS)
            hit = tokens // 64 * 64 - 64
            events.append(RequestArrived((f"r{self.arrived}", 0), tokens, hit, -(-tokens // 64)))
        return events


def lives(side: str, requests: int) -> float:
    """Requests a second through their whole lives: arrive, wait, be assigned by group fetches, prefill ended, handed
    over, ended; every group fetches once for every 8 requests that it gets, engine by engine as they would."""
    run = Run(side)
    prefilling: deque = deque()
    decoding: deque = deque()
    nodes = [(role, node) for role in NODES for node in range(NODES[role])]
    for role, node in nodes:
        run.handle([report(run.policy, role, node)])
    turn = 0
    ended = 0
    while ended < requests:
        starts = run.handle(run.arrivals(64))
        for _ in range(8):
            role, node = nodes[turn % len(nodes)]
            turn += 1
            starts += run.handle([report(run.policy, role, node)])
        prefilling += [action.key for action in starts if isinstance(action, Start)]
        if len(prefilling) > 600:
            keys = [prefilling.popleft() for _ in range(64)]
            starts = run.handle([event(key) for key in keys for event in (PrefillEnded, KvHandedOver)])
            prefilling += [action.key for action in starts]
            decoding += keys
        if len(decoding) > 3000:
            keys = [decoding.popleft() for _ in range(64)]
            starts = run.handle([RequestEnded(key) for key in keys])
            prefilling += [action.key for action in starts]
            ended += 64
    check_integrity(run.policy)
    return ended / run.spent


def fetch_of_100() -> float:
    """Seconds of a fetch that assigns 100 waiting requests to one group, decode side chosen before."""
    run = Run("shorter_queue")
    for node in range(NODES[Role.DECODE]):
        run.handle([report(run.policy, Role.DECODE, node)])
    assert not run.handle(run.arrivals(100))
    policy = run.policy
    loads = tuple(Load(f"{Role.PREFILL}-0-{gpu}", 0, 0, 0, 1e6, 0) for gpu in range(GPUS))
    object.__setattr__(policy.config, "beta", 1 << 40)
    policy.prefill._beta = 1 << 40
    begin = process_time()
    actions = policy.handle(Fetched(loads), 0.0)
    spent = process_time() - begin
    assert len(actions) == 100
    return spent


@pytest.mark.parametrize("side", ["shorter_queue", "split", "pe_only"])
def test_requests_a_second(side: str) -> None:
    gc.collect()
    rates = [lives(side, 10_000) for _ in range(5)]
    print(f"\n{side}: {max(rates):,.0f} requests/s at best of {len(rates)}, {median(rates):,.0f} in the middle")


def test_a_fetch_of_100() -> None:
    times = [fetch_of_100() for _ in range(30)]
    print(f"\na fetch that assigns 100: {1e3 * min(times):.2f} ms at best, {1e3 * median(times):.2f} ms in the middle")
