"""A request in a prefill engine.

    assigned -> staging -> ready (FIFO) -> in forwards, chunk by chunk -> first token out, rows delivered -> done
"""

from __future__ import annotations

from dataclasses import dataclass

from common.messages import Assign, PrefillStarted
from common.types import RequestKey
from services.prefill.batching import Pending


@dataclass(slots=True, eq=False)
class Sequence:
    """A request of ours.

    since: when it was assigned; due: when it is given up. cached: hit tokens, known once it is ready; planned: tokens
    of all chunks so far, computed or in hand: what the next one comes after. admission_s: until it had the
    device memory that it needs before its read; allocation_s, read_s: parts of TTFT (spec §10).
    """

    assign: Assign
    since: float
    due: float
    cached: int = 0
    planned: int = 0
    admission_s: float = 0.0
    allocation_s: float = 0.0
    read_s: float = 0.0
    ready: bool = False
    started: bool = False
    dropped: bool = False

    @property
    def key(self) -> RequestKey:
        return (self.assign.request.request_id, self.assign.request.attempt)

    @property
    def num_tokens(self) -> int:
        return self.assign.request.num_tokens

    @property
    def pending(self) -> Pending:
        cached = self.cached + self.planned
        return Pending(self.key, cached, self.num_tokens - cached)

    def start(self) -> PrefillStarted:
        """Its first forward is planned."""
        self.started = True
        miss = self.num_tokens - self.cached
        waited_s = self.assign.waited_s
        return PrefillStarted(*self.key, self.cached, miss, waited_s, self.allocation_s, self.read_s)
