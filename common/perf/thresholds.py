"""The scheduler's alpha and beta and the compute quota, derived from rates (spec §7, §8, §10)."""

from __future__ import annotations

from dataclasses import dataclass

ALPHA_S = 3.0
BETA_S = 5.0
QUOTA_S = 0.3


@dataclass(frozen=True, slots=True)
class Thresholds:
    """alpha, beta: tokens (spec §7). quota_s: attention time of a forward, all layers summed (spec §8)."""

    alpha: int
    beta: int
    quota_s: float = QUOTA_S


def thresholds(read_tokens_per_s: float, prefill_tokens_per_s: float) -> Thresholds:
    """From the tokens of KV that a node's storage NIC reads in a second, and the prompt tokens, hits included, that one
    engine prefills in a second at the workload's hit ratio. At least one token each.

    All times stretched by one factor leave alpha and beta as they are: take both rates before it is applied.
    """
    return Thresholds(max(1, int(ALPHA_S * read_tokens_per_s)), max(1, int(BETA_S * prefill_tokens_per_s)))
