"""Packing of a prefill forward, under fixed budgets and, if there is one, the compute quota. Pure (spec §8).

What is packed are values, though not frozen: there are many, and making a frozen one takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.types import RequestKey

#: Steps of the search for a quota's largest chunk that expect proportion.
LINES = 4


@dataclass(slots=True)
class Pending:
    """A request whose cached KV (hits and earlier chunks, in tokens) is staged, with miss tokens still to compute."""

    key: RequestKey
    cached: int
    miss: int


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class Quota:
    """Bound on the attention time of one forward: all layers, summed over its requests, of one engine.

    attention_s(cached, new): predicted for one request; it never falls as new grows.
    """

    limit_s: float
    attention_s: Callable[[int, int], float]

    def largest(self, cached: int, most: int, spent_s: float) -> int:
        """The most new tokens, up to `most`, that fit beside the time already spent. Attention time is nearly in
        proportion to them, so that a line between what fits and what does not mostly finds it in three steps; then
        by bisection."""
        left_s = self.limit_s - spent_s
        if left_s < 0:
            return 0
        too_many_s = self.attention_s(cached, most)
        if too_many_s <= left_s:
            return most
        fits, fits_s, too_many, steps = 0, 0.0, most, 0
        while too_many - fits > 1:
            if steps < LINES:
                steps += 1
                line = fits + int((too_many - fits) * (left_s - fits_s) / (too_many_s - fits_s))
                middle = min(max(line, fits + 1), too_many - 1)
            else:
                middle = (fits + too_many) // 2
            middle_s = self.attention_s(cached, middle)
            if middle_s <= left_s:
                fits, fits_s = middle, middle_s
            else:
                too_many, too_many_s = middle, middle_s
        return fits


def pack(pending: Sequence[Pending], budget: Budget, block_size: int, quota: Quota | None = None) -> list[Chunk]:
    """The next forward, FIFO. The request that does not fit whole is cut at a block border and ends the batch.

    Cutting at block borders lets every chunk but the last fill whole blocks. A request alone in its batch advances by a
    block at least, whatever the quota, if the rows budget holds its context.
    """
    batch: list[Chunk] = []
    tokens, rows, attention_s = budget.tokens, budget.rows, 0.0
    for request in pending[: budget.requests]:
        most = min(request.miss, tokens, rows - request.cached)
        if most <= 0:
            break
        if quota is None:
            new = _cut(request, most, block_size)
        else:
            new = _cut(request, quota.largest(request.cached, most, attention_s), block_size)
            if new == 0 and not batch:
                to_border = block_size - request.cached % block_size
                new = _cut(request, min(most, to_border), block_size)
            attention_s += quota.attention_s(request.cached, new)
        if new == 0:
            break
        last = new == request.miss
        batch.append(Chunk(request.key, request.cached, new, last))
        tokens -= new
        rows -= request.cached + new
        if not last:
            break
    return batch


def _cut(request: Pending, new: int, block_size: int) -> int:
    """All of the miss, or as much of `new` as ends at a block border; 0 if nothing does."""
    if new == request.miss:
        return new
    return max(0, (request.cached + new) // block_size * block_size - request.cached)
