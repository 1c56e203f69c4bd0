"""When a sequence ends well. Pure."""

from __future__ import annotations

from collections.abc import Set

from common.types import FinishReason, Sampling


def stop_ids(sampling: Sampling, eos_ids: Set[int]) -> frozenset[int]:
    """The tokens that end a request: its own stop tokens and, unless ignored, the model's."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))


def finish_reason(token: int, num_generated: int, sampling: Sampling, eos_ids: Set[int]) -> FinishReason | None:
    """Why the request ends with this token, or None.

    num_generated: output tokens so far, with this one and those of earlier attempts.
    """
    if num_generated >= sampling.min_tokens and token in stop_ids(sampling, eos_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= sampling.max_tokens else None
