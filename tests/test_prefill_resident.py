"""Admission to device memory where a request keeps all of its layers there (the Basic system, spec §9)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.blocks.geometry import BlockGeometry, RowPart
from common.messages import Assign
from common.types import ReadPath, Request, Sampling
from services.prefill.resident import Resident
from services.prefill.sequence import Sequence

GEOMETRY = BlockGeometry(2, 64, (RowPart("kv", 1, 8, "uint8"),))


class Host:
    """An engine with device memory for so many tokens. staged: requests that may read."""

    def __init__(self, tokens: int) -> None:
        self.geometry = GEOMETRY
        self.memory = SimpleNamespace(budget=tokens * GEOMETRY.bytes_per_token)
        self.staged: list[str] = []

    def stage_sequence(self, sequence: Sequence) -> None:
        self.staged.append(sequence.key[0])


def sequence(name: str, tokens: int) -> Sequence:
    request = Request(name, 0, "", bytes(4 * tokens), b"", Sampling(1))
    member: Any = None
    return Sequence(Assign(request, member, member, ReadPath.PE, 0, 0, 0.0, 1), 0.0, 0.0)


def test_a_request_that_leaves_the_queue_holds_up_nobody():
    """300 tokens of memory: a has 200 of them, b wants as many, c only 100; once b is gone, c fits beside a."""
    host: Any = Host(300)
    resident = Resident(host)
    requests = {name: sequence(name, tokens) for name, tokens in (("a", 200), ("b", 200), ("c", 100))}
    for request in requests.values():
        resident.assigned(request)
    assert host.staged == ["a"]  # strictly in order
    requests["b"].dropped = True
    resident.dropped(requests["b"])
    assert host.staged == ["a", "c"]
    for name in ("a", "c"):
        requests[name].dropped = True
        resident.dropped(requests[name])
    assert resident.pool.used == 0
