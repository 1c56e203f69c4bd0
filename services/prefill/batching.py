"""Packing of a prefill forward batch. Pure (spec §8, with a fixed token budget)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import RequestKey


@dataclass(frozen=True, slots=True)
class Pending:
    """A request whose cached KV (hits and earlier chunks, in tokens) is staged, with miss tokens still to compute."""

    key: RequestKey
    cached: int
    miss: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one forward computes of a request: new tokens after cached ones. last: nothing is left after it."""

    key: RequestKey
    cached: int
    new: int
    last: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one forward: computed tokens, rows of a layer slot (cached and new), requests."""

    tokens: int
    rows: int
    requests: int


def pack(pending: Sequence[Pending], budget: Budget, block_size: int) -> list[Chunk]:
    """The next forward, FIFO. The request that does not fit whole is cut at a block border and ends the batch.

    Cutting at block borders lets every chunk but the last fill whole blocks. A single request always advances if the
    rows budget holds its whole context.
    """
    batch: list[Chunk] = []
    tokens, rows = budget.tokens, budget.rows
    for request in pending[: budget.requests]:
        new = min(request.miss, tokens, rows - request.cached)
        last = new == request.miss
        if not last:
            new = (request.cached + new) // block_size * block_size - request.cached
        if new <= 0:
            break
        batch.append(Chunk(request.key, request.cached, new, last))
        tokens -= new
        rows -= request.cached + new
        if not last:
            break
    return batch
