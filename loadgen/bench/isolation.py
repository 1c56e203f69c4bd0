"""Isolation in miniature: a small message of the high class on a compute NIC, alone, under KV without classes, and with
them, between namespaces (compose.fabric), through the project's own tcp transport.

In "direct" KV and the small message share the sender's NIC; in "incast" KV comes from other nodes and all meet at the
receiver's, where only the switch can tell them apart.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

from common.config import NetworkConfig
from common.isolation.latency import Latency
from common.isolation.phases import Place, awake, bulk_from, ping_from, target_at
from common.transport.base import Intent
from compose.fabric import Fabric

PING, RECEIVER = "p0", "d0"


@dataclass(frozen=True, slots=True)
class Phase:
    """bulk: the nodes that KV comes from, all of it to RECEIVER. sender, receiver: whether classes are told apart at
    the NICs' own ends, and at the switch's."""

    name: str
    bulk: tuple[str, ...]
    sender: bool
    receiver: bool


DIRECT, INCAST = (PING,), ("p1", "p2")
PHASES = (
    Phase("idle", (), True, True),
    Phase("unisolated", DIRECT, False, False),
    Phase("isolated", DIRECT, True, True),
    Phase("incast_unisolated", INCAST, False, False),
    Phase("incast_sender_only", INCAST, True, False),
    Phase("incast_isolated", INCAST, True, True),
)
SHAPE = (3, 1)

Round = dict[str, Latency]


@asynccontextmanager
async def _targets(fabric: Fabric) -> AsyncIterator[tuple[str, str]]:
    """One for small messages, one for bulk: processes that do not hold up one another."""
    async with AsyncExitStack() as ends:
        place = _place(fabric, RECEIVER)
        small, big = target_at(place), target_at(place, gives_way=True)
        yield await ends.enter_async_context(small), await ends.enter_async_context(big)


def _place(fabric: Fabric, node: str) -> Place:
    return Place(fabric.addresses(node)["cnic"], NetworkConfig(transport="tcp"), tuple(fabric.prefix(node)))


async def measure(
    rate: int,
    rounds: int,
    seconds: float,
    flows: int,
    on_phase: Callable[[int, Phase, Latency], None],
    phases: Sequence[Phase] = PHASES,
) -> list[Round]:
    """So many rounds, every phase once in each, in another order. rate: of every compute NIC, bytes/s; seconds: of
    small messages in each phase; flows: connections from each node. ConfigError if there can be no fabric here."""
    chance = random.Random(0)
    measured: list[Round] = [{} for _ in range(rounds)]
    with Fabric.up(*SHAPE, rate, rate) as fabric:
        async with awake(), _targets(fabric) as (small, big):
            for number, results in enumerate(measured):
                for phase in chance.sample(phases, len(phases)):
                    results[phase.name] = await _measure(fabric, phase, small, big, seconds, flows)
                    on_phase(number, phase, results[phase.name])
    return [{phase.name: results[phase.name] for phase in phases} for results in measured]


async def _measure(fabric: Fabric, phase: Phase, small: str, big: str, seconds: float, flows: int) -> Latency:
    fabric.set_classes(phase.sender, ("tx",))
    fabric.set_classes(phase.receiver, ("rx",))
    places = [_place(fabric, node) for node in phase.bulk]
    async with bulk_from(places, big, Intent.KV_LOAD, flows) if places else nullcontext():
        return await ping_from(_place(fabric, PING), small, seconds)
