"""FLOPs and bytes of the models against the paper's Table 1 and figures derived from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.perf.models import DS_27B, DS_660B, MODELS, QWEN_32B, Indexer, LatentAttention, attended, get_model_profile

APPEND = 429
#: Weights of ds-660b's embedding, and as many of its head.
EMBEDDING = 129_280 * 7168


def cache_to_compute(model, context, flops):
    return model.kv_bytes_per_token * context / flops * 1e15 / 1e9


def test_kv_bytes_of_a_token():
    assert DS_660B.kv_bytes_per_token == 40_016
    assert DS_660B.resident_bytes_per_token == 48_068
    assert DS_27B.kv_bytes_per_token == 19_680
    assert DS_27B.resident_bytes_per_token == 21_720
    assert QWEN_32B.kv_bytes_per_token == QWEN_32B.resident_bytes_per_token == 262_144


def test_a_mean_turn_of_ds_660b():
    """1.309 GB of KV. Linear 74e9 x 429 = 31.75 TFLOP; sparse attention 61 x 2 x 128 x 1088 x 429 x 2048 = 14.93;
    indexer 61 x 2 x 64 x 128 x (429 x 32,721 + 429^2 / 2) = 14.12; in sum 60.8 (60.7 within 0.2 %)."""
    assert DS_660B.kv_bytes_per_token * 32_721 == pytest.approx(1.309e9, rel=1e-3)
    flops = DS_660B.attention_flops(32_721, APPEND)
    assert DS_660B.linear_flops(APPEND) == pytest.approx(31.75e12, rel=1e-3)
    assert flops.attention == pytest.approx(14.93e12, rel=1e-3)
    assert flops.indexer == pytest.approx(14.12e12, rel=1e-3)
    assert DS_660B.flops(32_721, APPEND) == pytest.approx(60.7e12, rel=2e-3)


@pytest.mark.parametrize(("context", "ratio"), [(16 << 10, 12.6), (32_721, 22.1), (64 << 10, 35.8)])
def test_cache_to_compute_ratio_of_ds_660b(context, ratio):
    """As derived without embeddings and head."""
    flops = DS_660B.flops(context, APPEND) - 2 * 2 * EMBEDDING * APPEND
    assert cache_to_compute(DS_660B, context, flops) == pytest.approx(ratio, rel=5e-3)


def test_cache_to_compute_ratio_of_ds_660b_with_embeddings():
    assert cache_to_compute(DS_660B, 32_721, DS_660B.flops(32_721, APPEND)) == pytest.approx(21.6, rel=5e-3)


@pytest.mark.parametrize(("context", "ratio"), [(16 << 10, 117), (64 << 10, 267)])
def test_cache_to_compute_ratio_of_qwen(context, ratio):
    assert cache_to_compute(QWEN_32B, context, QWEN_32B.flops(context, APPEND)) == pytest.approx(ratio, rel=5e-3)


@pytest.mark.parametrize(("context", "ratio"), [(16 << 10, 4.3), (64 << 10, 5.2)])
def test_cache_to_compute_ratio_of_dense_latent_attention(context, ratio):
    """DeepSeek V3: the same shape without the indexer (0.9e9 of the weights)."""
    dense = replace(DS_660B, attention=LatentAttention(128, 512, 64, 656))
    flops = dense.flops(context, APPEND) - 2 * (2 * EMBEDDING + 0.9e9) * APPEND
    assert cache_to_compute(dense, context, flops) == pytest.approx(ratio, rel=3e-2)


def test_weights_of_a_mixture_of_experts():
    """From the shapes; hidden x width x 3 matrices an expert."""
    assert DS_660B.expert_params == pytest.approx(58 * 256 * 3 * 7168 * 2048, rel=1e-3)
    assert DS_660B.shared_params + DS_660B.expert_params == pytest.approx(671e9, rel=5e-3)
    assert DS_27B.expert_params == pytest.approx(29 * 72 * 3 * 2560 * 1536, rel=2e-3)
    assert DS_27B.shared_params + DS_27B.expert_params == pytest.approx(27e9, rel=2e-2)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 4096))
def test_attended_positions_are_the_sum_of_each_tokens(cached, new, top_k):
    """Half a position a token apart, at most: the area under a line instead of steps."""
    steps = sum(min(position, top_k) for position in range(cached + 1, cached + new + 1))
    assert abs(attended(cached, new, top_k) - steps) <= new / 2 + 1e-6
    assert attended(cached, new) == new * cached + new * new / 2


def test_sparse_attention_over_a_short_context_is_dense():
    dense = LatentAttention(128, 512, 64, 656)
    sparse = LatentAttention(128, 512, 64, 656, Indexer(64, 128, 2048, 132))
    assert sparse.flops(1000, 1000).attention == dense.flops(1000, 1000).attention
    assert sparse.flops(2000, 1000).attention < dense.flops(2000, 1000).attention
    assert (dense.kind, sparse.kind) == ("mla", "dsa")


def test_an_unknown_model_is_named_with_those_there_are():
    assert get_model_profile("ds-27b") is MODELS["ds-27b"]
    with pytest.raises(ConfigError, match=r"'gpt'.*ds-660b, ds-27b, qwen-32b"):
        get_model_profile("gpt")


@given(st.integers(0, 70_000), st.integers(1, 9_000), st.sampled_from(sorted(MODELS)))
def test_costs_are_flops_and_bytes(cached: int, new: int, name: str) -> None:
    attention = MODELS[name].attention
    assert attention.costs(cached, new) == (*attention.flops(cached, new), attention.read_bytes(cached, new))
