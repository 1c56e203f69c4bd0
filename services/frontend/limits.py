"""Is what a client asks for possible? Pure checks of a parsed request against the model and the cluster.

Each refusal names the field, the limit and the actual value; nothing has been dispatched by then.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from common.types import Sampling
from services.frontend.errors import ApiError
from services.frontend.fields import MAX_SEQUENCES
from services.frontend.schema import GenerationRequest

#: What the OpenAI API generates at /v1/completions if max_tokens is not given.
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0


def check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        message = f"model: {asked!r} does not exist; this server serves {served!r}"
        raise ApiError(message, "model", status=404, code="model_not_found")


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    for value in (min(ids), max(ids)):
        if not 0 <= value < vocab_size:
            at = ids.index(value)
            raise ApiError(f"{field}: token ids must be from 0 to {vocab_size - 1}, got {value} at index {at}", field)


def check_prompt(field: str, num_tokens: int, limit: int) -> None:
    """There is a prompt, and room for at least one token after it. limit: tokens of prompt and output together."""
    if not num_tokens:
        raise ApiError(f"{field}: must have at least 1 token, got 0", field)
    if num_tokens >= limit:
        message = (
            f"{field}: the context is limited to {limit} tokens and at least 1 must be generated; "
            f"got a prompt of {num_tokens} tokens"
        )
        raise ApiError(message, field, code="context_length_exceeded")


def check_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise ApiError(f"n: {num_prompts} prompts times n must be at most {MAX_SEQUENCES}; got {num_prompts * n}", "n")


def check_hit_tokens(hit_tokens: int, num_prompt: Sequence[int]) -> None:
    """num_prompt: the length of each prompt."""
    if len(num_prompt) > 1:
        raise ApiError(f"hit_tokens: is of one prompt, got {len(num_prompt)} prompts", "hit_tokens")
    if hit_tokens > num_prompt[0]:
        message = f"hit_tokens: must be at most the prompt's length, which is {num_prompt[0]}; got {hit_tokens}"
        raise ApiError(message, "hit_tokens")


def resolve_sampling(
    request: GenerationRequest, num_prompt: int, limit: int, vocab_size: int, default_max_tokens: int | None
) -> Sampling:
    """The sampling parameters, all defaults filled in. default_max_tokens None: the rest of the context."""
    room = limit - num_prompt
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, field)
    if max_tokens is None:
        max_tokens = min(default_max_tokens or room, room)
    if max_tokens > room:
        message = (
            f"{field}: the context is limited to {limit} tokens, which leaves {room} after a prompt of {num_prompt}; "
            f"got {max_tokens}"
        )
        raise ApiError(message, field, code="context_length_exceeded")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(f"min_tokens: must be at most {field}, which is {max_tokens}; got {min_tokens}", "min_tokens")
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options: only allowed where stream is true", "stream_options")
    stop_token_ids = request.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, vocab_size)
    check_token_ids("logit_bias", list(request.logit_bias), vocab_size)
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
    return Sampling(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        seed=seed,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(stop_token_ids),
        logit_bias=tuple(request.logit_bias.items()),
        logprobs=request.alternatives,
    )
