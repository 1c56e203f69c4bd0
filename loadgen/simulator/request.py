"""One attempt at one turn, as everybody in the simulation knows it."""

from __future__ import annotations

from typing import Protocol

from common.perf.links import FifoLink
from common.types import RequestKey
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.player import Player
from services.prefill.batching import Pending


class PrefillSide(Protocol):
    """Its prefill engine, as far as others have to do with that."""

    def ready(self, request: Request) -> None:
        """Its KV is staged on both sides."""


class DecodeSide(Protocol):
    """Its decode engine, likewise. tx, rx: of its compute NIC."""

    tx: FifoLink
    rx: FifoLink

    def deliver(self, request: Request) -> None:
        """The staging buffer holds all of its KV, and its first token is known."""


class Request:
    """Lengths in tokens, times in seconds on the clock.

    player: whose turn it is. due: when it was meant to be sent; arrived: at the scheduler. generate: tokens that this
    attempt is to make; made: those that it had made when it was lost.

    started_at: when both engines were chosen; staged_at: when its hits were asked for; ready_at: when all were
    buffered. reads: of those whose read it waits for. pe_tokens: of the hits, those that the prefill side reads;
    own_rows: leading ones that its buffer has room for. sent: leading rows that the decode side's buffer holds, or will
    once they have arrived. cached: tokens with KV, hits and chunks planned so far; pending: what is left to compute.

    first_at, second_at: of its tokens. pages: of device memory. joined: number of the step of its decode engine before
    its first one; decode_s: its share of each step. gone: it has ended, well or badly: whoever comes across it lets go.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "cached",
        "decode",
        "decode_s",
        "due",
        "first_at",
        "generate",
        "gone",
        "hit",
        "joined",
        "key",
        "made",
        "own_rows",
        "pages",
        "pe_tokens",
        "pending",
        "player",
        "prefill",
        "prompt",
        "reads",
        "ready_at",
        "second_at",
        "sent",
        "staged_at",
        "started_at",
    )

    prefill: PrefillSide
    decode: DecodeSide
    pending: Pending
    arrived: float
    started_at: float
    staged_at: float
    joined: int
    decode_s: float

    def __init__(self, key: RequestKey, player: Player, prompt: int, hit: int, generate: int, due: float) -> None:
        self.key = key
        self.player = player
        self.prompt = prompt
        self.hit = hit
        self.generate = generate
        self.due = due
        self.blocks = -(-prompt // BLOCK_TOKENS)
        self.reads = 0
        self.cached = hit
        self.pe_tokens = 0
        self.own_rows = 0
        self.sent = 0
        self.pages = 0
        self.made = 0
        self.first_at = -1.0
        self.ready_at = -1.0
        self.second_at = float("nan")
        self.gone = False

    def is_ready(self, now: float) -> None:
        """All hits are buffered on both sides."""
        self.ready_at = now
        self.pending = Pending(self.key, self.cached, self.prompt - self.cached)

    def planned(self, tokens: int) -> None:
        """A chunk that is not the last one."""
        self.cached += tokens
        self.pending = Pending(self.key, self.cached, self.prompt - self.cached)
