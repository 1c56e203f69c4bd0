"""One forward of a prefill engine."""

from __future__ import annotations

from common.blocks.ranges import Range
from loadgen.simulator.request import Request
from services.prefill.batching import Chunk


class Forward:
    """attention_s: of its engine; tokens: new ones. memory: what it takes of device memory. planned_at: when its loads
    began; load_s: how long the NIC that they come in by is busy with them; load_end: when they are through. drained_at:
    when its rows are delivered."""

    __slots__ = (
        "attention_s",
        "chunks",
        "drained_at",
        "load_end",
        "load_s",
        "memory",
        "planned_at",
        "requests",
        "tokens",
    )

    memory: Range

    def __init__(self, requests: list[Request], chunks: list[Chunk], attention_s: float, planned_at: float) -> None:
        self.requests = requests
        self.chunks = chunks
        self.attention_s = attention_s
        self.tokens = sum([chunk.new for chunk in chunks])
        self.planned_at = planned_at
        self.load_s = 0.0
        self.load_end = planned_at
        self.drained_at = 0.0
