"""Sampling: greedy, the filters, seeds that do not depend on who samples; and when a sequence ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from common.finish import finish_reason
from common.types import FinishReason, Sampling
from services.engine.torch_backend import sampler

VOCAB = 50
EOS = {2, 3}


def sample(logits: torch.Tensor, requests: Sequence[tuple[Sampling, int]], eos_ids: set[int]) -> list[int]:
    return [sampled.token for sampled in sampler.sample(logits, requests, eos_ids)]


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(row: torch.Tensor, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """How often each token is drawn over output indexes 0 .. count-1."""
    tokens = sample(row.expand(count, -1).clone(), [(sampling, index) for index in range(count)], EOS)
    return torch.tensor(tokens).bincount(minlength=len(row)) / count


def test_temperature_zero_is_argmax() -> None:
    logits = random_logits(5)
    requests = [(Sampling(10, seed=i), i) for i in range(5)]
    assert sample(logits.clone(), requests, EOS) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(10, temperature=1.0, top_k=1), Sampling(10, temperature=1.0, top_p=0.0), Sampling(10, temperature=1e-6)],
)
def test_narrow_sampling_is_argmax(sampling: Sampling) -> None:
    logits = random_logits(20)
    tokens = sample(logits.clone(), [(sampling, index) for index in range(20)], EOS)
    assert tokens == logits.argmax(-1).tolist()


def test_tokens_come_with_their_probabilities() -> None:
    probabilities = [0.4, 0.3, 0.2, 0.06, 0.04]
    expected = torch.tensor(probabilities)
    row = logits_of(probabilities)
    torch.testing.assert_close(drawn(row, Sampling(10, temperature=1.0)), expected, atol=0.025, rtol=0)
    squared = expected.square() / expected.square().sum()
    torch.testing.assert_close(drawn(row, Sampling(10, temperature=0.5)), squared, atol=0.025, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(10, temperature=1.0, top_k=2), {1, 4}),
        (Sampling(10, temperature=1.0, top_p=0.65), {1, 4}),
        (Sampling(10, temperature=1.0, top_p=0.75), {1, 4, 0}),
        (Sampling(10, temperature=1.0, top_k=3, top_p=0.75), {1, 4}),  # top-p of what top-k leaves: 0.4 + 0.3 of 0.9
        (Sampling(10, temperature=1.0, top_k=99), {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_filters_keep_the_likeliest(sampling: Sampling, kept: set[int]) -> None:
    probabilities = [0.2, 0.4, 0.06, 0.04, 0.3]
    frequencies = drawn(logits_of(probabilities), sampling)
    assert set(frequencies.nonzero().flatten().tolist()) == kept
    mass = sum(probabilities[token] for token in kept)
    for token in kept:
        assert frequencies[token] == pytest.approx(probabilities[token] / mass, abs=0.03)


def test_a_token_depends_on_seed_and_index_only() -> None:
    """The same row gives the same token alone, in another batch, beside greedy rows, and if its logits round off."""
    logits = random_logits(64)
    sampling = Sampling(100, temperature=0.9, top_p=0.95, top_k=40, seed=7)
    requests = [(sampling, index) for index in range(64)]
    together = sample(logits.clone(), requests, EOS)
    alone = [sample(logits[i : i + 1].clone(), requests[i : i + 1], EOS)[0] for i in range(64)]
    assert together == alone
    mixed = [request if i % 2 else (Sampling(100), i) for i, request in enumerate(requests)]
    assert sample(logits.clone(), mixed, EOS)[1::2] == together[1::2]
    assert sample(logits + 1e-6 * random_logits(64, seed=1), requests, EOS) == together
    reseeded = [(Sampling(100, temperature=0.9, seed=8), index) for index in range(64)]
    assert sample(logits.clone(), reseeded, EOS) != together


def test_min_tokens_holds_back_the_end() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 3], row[0, 9], row[0, 11] = 9.0, 8.0, 7.0, 6.0

    def at(index: int, **settings: object) -> int:
        return sample(row.clone(), [(Sampling(10, min_tokens=4, **settings), index)], EOS)[0]  # type: ignore[arg-type]

    assert [at(3), at(4)] == [9, 2]
    assert [at(3, stop_token_ids=(9,)), at(4, stop_token_ids=(9,))] == [11, 2]
    assert at(0, ignore_eos=True) == 2
    assert at(0, stop_token_ids=(9, VOCAB, -1)) == 11, "tokens that do not exist are ignored"
    hot = [(Sampling(100, min_tokens=100, temperature=5.0, stop_token_ids=(9,)), index) for index in range(100)]
    assert not set(sample(row.expand(100, -1).clone(), hot, EOS)) & {2, 3, 9}


def test_bias_moves_the_choice_and_comes_before_the_ban() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 9], row[0, 11] = 7.0, 6.0

    def at(index: int, *bias: tuple[int, float], **settings: object) -> int:
        return sample(row.clone(), [(Sampling(10, logit_bias=bias, **settings), index)], EOS)[0]  # type: ignore[arg-type]

    assert at(0, (11, 0.5)) == 9
    assert at(0, (11, 1.5)) == 11
    assert at(0, (9, -100.0), (11, -100.0), (20, 1.0)) == 20
    assert at(0, (2, 100.0), min_tokens=1) == 9 and at(1, (2, 100.0), min_tokens=1) == 2
    assert at(0, (VOCAB, 100.0)) == 9, "a token that does not exist is ignored"
    drawn_ids = {at(index, (30, 100.0), temperature=2.0) for index in range(50)}
    assert drawn_ids == {30}


def test_logprobs_are_the_models_own_whatever_is_done_to_the_choice() -> None:
    """By hand: probabilities 1/2, 1/4, 1/8, 1/8, with a bias, a ban, a temperature and filters beside them."""
    row = logits_of([0.25, 0.125, 0.5, 0.125])
    sampling = Sampling(9, logprobs=2, logit_bias=((2, -100.0),), temperature=0.5, top_k=1, seed=3)
    banned = Sampling(9, logprobs=0, min_tokens=5)
    plain = Sampling(9)
    logits = torch.stack([row, row, row])
    first, second, third = sampler.sample(logits, [(sampling, 0), (banned, 0), (plain, 0)], {2})
    assert first.token == 0 and first.logprobs is not None
    assert first.logprobs.chosen == pytest.approx(math.log(0.25))
    assert [token for token, _ in first.logprobs.top] == [2, 0]
    assert [value for _, value in first.logprobs.top] == pytest.approx([math.log(0.5), math.log(0.25)])
    assert second.token == 0 and second.logprobs is not None and second.logprobs.top == ()
    assert second.logprobs.chosen == pytest.approx(math.log(0.25))
    assert third == sampler.Sampled(2, None)


@pytest.mark.parametrize(
    ("token", "num_generated", "sampling", "reason"),
    [
        (5, 1, Sampling(10), None),
        (5, 10, Sampling(10), FinishReason.LENGTH),
        (2, 1, Sampling(10), FinishReason.STOP),
        (3, 10, Sampling(10), FinishReason.STOP),
        (2, 1, Sampling(10, ignore_eos=True), None),
        (2, 10, Sampling(10, ignore_eos=True), FinishReason.LENGTH),
        (7, 1, Sampling(10, stop_token_ids=(7,)), FinishReason.STOP),
        (7, 1, Sampling(10, stop_token_ids=(7,), ignore_eos=True), FinishReason.STOP),
        (2, 3, Sampling(10, min_tokens=4), None),
        (2, 4, Sampling(10, min_tokens=4), FinishReason.STOP),
    ],
)
def test_finish_reason(token: int, num_generated: int, sampling: Sampling, reason: FinishReason | None) -> None:
    assert finish_reason(token, num_generated, sampling, EOS) is reason
