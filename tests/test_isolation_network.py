"""The isolation figure on a fabric: that traffic rides the classes that it should, whatever this machine's times."""

from __future__ import annotations

from collections import Counter

import pytest

from common.isolation.latency import Latency
from compose.fabric import Fabric
from loadgen.bench.isolation import DIRECT, INCAST, PHASES, RECEIVER, Phase, measure
from tests.fabric_support import need_fabric

pytestmark = pytest.mark.fabric

RATE = 20_000_000
MEGABYTE = 1_000_000


def low_bytes(fabric: Fabric) -> Counter[tuple[str, str]]:
    """Of the low class on the compute network, by node and direction."""
    return Counter(
        {(at.node, at.direction): at.bytes for at in fabric.stats() if (at.nic, at.traffic_class) == ("cnic", "low")}
    )


async def test_kv_rides_the_low_class_exactly_where_classes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    need_fabric()
    fabrics: list[Fabric] = []
    up = Fabric.up
    monkeypatch.setattr(Fabric, "up", lambda *shape: fabrics.append(up(*shape)) or fabrics[0])
    passed: dict[str, Counter[tuple[str, str]]] = {}
    seen: Counter[tuple[str, str]] = Counter()

    def note(number: int, phase: Phase, latency: Latency) -> None:
        nonlocal seen
        now = low_bytes(fabrics[0])
        passed[phase.name], seen = now - seen, now
        assert latency.count > 0

    measured = await measure(RATE, 1, 0.5, 1, note)
    assert list(measured[0]) == [phase.name for phase in PHASES]
    for phase in PHASES:
        of_phase = passed[phase.name]
        for node in {*DIRECT, *INCAST}:
            rides = phase.sender and node in phase.bulk
            assert (of_phase[node, "tx"] > MEGABYTE) == rides, (phase.name, node, of_phase)
        assert (of_phase[RECEIVER, "rx"] > MEGABYTE) == (phase.receiver and bool(phase.bulk)), (phase.name, of_phase)
        assert of_phase[RECEIVER, "tx"] < MEGABYTE, "acknowledgements only"
