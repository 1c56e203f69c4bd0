"""From logits to tokens: bias, bans, greedy, temperature, top-k, top-p; and their log probabilities.

Randomness is a function of (seed, output index) alone, so a token is the same whichever engine samples it, in whichever
attempt and whichever batch (the prefill engine samples index 0, the decode engine the rest).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from hashlib import blake2b

import torch
from torch import Tensor

from common.finish import stop_ids
from common.types import Logprobs, Sampled, Sampling


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[tuple[Sampling, int]], eos_ids: Set[int]) -> list[Sampled]:
    """One token for each row of logits [n, vocab]; requests[i] is row i's sampling and output index (from 0).

    Tokens that would end the request are not chosen while index < min_tokens. logits may be changed.
    """
    asked = [row for row, (sampling, _) in enumerate(requests) if sampling.logprobs is not None]
    logprobs = logits[asked].float().log_softmax(dim=-1) if asked else logits.new_empty(0)
    for row, (sampling, index) in zip(logits, requests, strict=True):
        _change(row, sampling, index, eos_ids)
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, (sampling, _) in enumerate(requests) if sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [requests[row] for row in drawn])
    chosen = tokens.tolist()
    sampled = [Sampled(token) for token in chosen]
    for row, values in zip(asked, logprobs, strict=True):
        sampled[row] = Sampled(chosen[row], _report(values, chosen[row], requests[row][0].logprobs or 0))
    return sampled


def _change(row: Tensor, sampling: Sampling, index: int, eos_ids: Set[int]) -> None:
    """Add the bias to one row of logits [vocab], and ban what must not be chosen yet."""
    if bias := {token: value for token, value in sampling.logit_bias if 0 <= token < len(row)}:
        row[list(bias)] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    if index < sampling.min_tokens:
        row[[token for token in stop_ids(sampling, eos_ids) if 0 <= token < len(row)]] = float("-inf")


def _report(logprobs: Tensor, chosen: int, count: int) -> Logprobs:
    """Of one row [vocab]."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return Logprobs(float(logprobs[chosen]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def uniform(seed: int, index: int) -> float:
    """A number in (0, 1) for one output position: one of 2**32, so that scaling it in float64 never rounds up to 1."""
    digest = blake2b(b"%d %d" % (seed, index), digest_size=4).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**32


def _draw(logits: Tensor, requests: Sequence[tuple[Sampling, int]]) -> Tensor:
    """Rows with a temperature -> tokens [n], by inverting the cumulative distribution at uniform(seed, index)."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([sampling.temperature for sampling, _ in requests])
    weights = (logits.double() / temperature).softmax(dim=-1)
    if any(sampling.top_k or sampling.top_p < 1 for sampling, _ in requests):
        top_k = column([sampling.top_k or logits.shape[1] for sampling, _ in requests])
        weights = _keep_top(weights, top_k, column([sampling.top_p for sampling, _ in requests]))
    # cumulated in the order of ids: where rounding differs, two ranks may swap, but a boundary here barely moves
    cumulative = weights.cumsum(dim=-1)
    targets = column([uniform(sampling.seed, index) for sampling, index in requests]) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _keep_top(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the top_k likeliest tokens and, of these, the likeliest that together reach top_p of their sum."""
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranked[torch.arange(ranked.shape[1], device=ranked.device) >= top_k] = 0
    before = ranked.cumsum(dim=-1) - ranked
    dropped = before >= top_p * ranked.sum(dim=-1, keepdim=True)
    dropped[:, 0] = False  # top_p 0 still leaves the likeliest token
    return torch.zeros_like(probabilities).scatter_(1, order, ranked.masked_fill_(dropped, 0))
