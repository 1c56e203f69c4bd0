"""Predicted times: worked examples, calibration against published figures, and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.perf.compute import ComputeModel
from common.perf.hardware import HARDWARE, Efficiency, Hardware, get_hardware
from common.perf.models import DS_660B, MODELS, QWEN_32B, GroupedQueryAttention, ModelProfile
from common.perf.thresholds import thresholds

H800 = HARDWARE["h800"]
#: One layer; 1 head of 1 number (4 FLOPs a position), 2 bytes of KV a token; 50 weights, of which 40 are experts.
TOY = ModelProfile("toy", 1, GroupedQueryAttention(1, 1, 1, 1), 50, 10, 40, 1, 1000, 4, 1.0, 1.0)
#: 100 FLOP/s, 10 bytes/s; linear layers reach half of the peak, everything else all of it; a layer costs 1 s.
SLOW = Hardware(
    "slow",
    flops_16bit=100,
    flops_8bit=100,
    hbm_rate=10,
    hbm_bytes=100,
    efficiency=Efficiency(
        linear_experts=0.5, prefill_gqa=1.0, decode_attention=1.0, hbm=1.0, prefill_layer_s=1.0, decode_layer_s=1.0
    ),
)

models = st.sampled_from(list(MODELS.values()))
lengths = st.integers(0, 150_000)
some = st.integers(1, 5_000)


def test_attention_is_the_slower_of_computing_and_reading():
    """60 new after 20: 4 x (1200 + 1800) FLOP = 120 s; 80 rows of 2 bytes = 16 s. 1 after 99: 3.98 against 20 s."""
    gpu = ComputeModel(TOY, SLOW)
    assert gpu.prefill_attention_s(20, 60) == pytest.approx(120)
    assert gpu.prefill_attention_s(99, 1) == pytest.approx(20)
    assert gpu.prefill_attention_s(99, 0) == 0


def test_linear_layers_are_the_slower_of_computing_and_reading_weights():
    """100 FLOP a token at 50 FLOP/s; a GPU holds 10 + 40 / 4 = 20 weights, read in 2 s; a layer costs 1 s."""
    gpu = ComputeModel(TOY, SLOW)
    assert gpu.prefill_linear_s(10) == pytest.approx(20 + 1)
    assert gpu.prefill_linear_s(1) == pytest.approx(2 + 1)
    assert gpu.prefill_linear_s(0) == 0


def test_several_gpus_share_a_batch_but_not_a_request():
    """Requests of 120, 120 and 20 s of attention on two GPUs: 130 s at best; one of 120 s stays 120 s."""
    gpus = ComputeModel(TOY, SLOW, gpus=2)
    batch = gpus.prefill_s([(20, 60), (20, 60), (99, 1)])
    assert batch.attention_s == pytest.approx(130)
    assert batch.linear_s == pytest.approx(121 + 1)
    assert batch.total_s == pytest.approx(252)
    assert gpus.prefill_s([(20, 60)]).attention_s == pytest.approx(120)


def test_a_decode_step():
    """Contexts of 50 and 100 read 100 + 200 bytes: 30 s; two tokens compute 4 s, weights take 2; one layer, 1 s."""
    assert ComputeModel(TOY, SLOW).decode_step_s([50, 100]) == pytest.approx(30 + 4 + 1)
    assert ComputeModel(TOY, SLOW).decode_step_s([]) == 0


def test_prefill_speed_of_ds_660b_is_that_of_public_figures():
    """About 300 TFLOP/s over a whole turn of the paper's load."""
    gpu = ComputeModel(DS_660B, H800)
    turns_per_s = gpu.tokens_per_s(32_400, 284) / 32_684
    assert turns_per_s * DS_660B.flops(32_400, 284) == pytest.approx(300e12, rel=0.02)


def test_decode_speed_of_ds_660b_is_in_the_published_range():
    """TPOT 0.036 to 0.039 s."""
    assert 0.036 <= ComputeModel(DS_660B, H800).decode_step_s([33_000] * 64) <= 0.039


def test_memory_beside_the_weights():
    """(0.9 x 80 GB - 18 GB - 654 GB / 32) / 48,068 bytes."""
    assert ComputeModel(DS_660B, H800).kv_tokens() == int((72e9 - 18e9 - 654e9 / 32) / 48_068)
    assert ComputeModel(replace(QWEN_32B, shared_params=80e9), H800).kv_tokens() == 0


@given(models, lengths, some, lengths, some, st.integers(1, 8))
def test_prefill_grows_with_every_argument(model, cached, new, more_cached, more_new, gpus):
    engine = ComputeModel(model, H800, gpus)
    one = engine.prefill_s([(cached, new)])
    assert one.attention_s > 0
    assert one.linear_s > 0
    longer = engine.prefill_s([(cached + more_cached, new)])
    assert longer.attention_s >= one.attention_s
    wider = engine.prefill_s([(cached, new + more_new)])
    assert wider.attention_s >= one.attention_s
    assert wider.linear_s >= one.linear_s
    both = engine.prefill_s([(cached, new), (more_cached, more_new)])
    assert both.attention_s >= one.attention_s
    assert both.linear_s >= one.linear_s
    fewer = ComputeModel(model, H800, gpus + 1).prefill_s([(cached, new), (more_cached, more_new)])
    assert fewer.attention_s <= both.attention_s
    assert fewer.linear_s <= both.linear_s


@given(models, st.lists(st.integers(1, 150_000), min_size=1, max_size=80), st.integers(1, 150_000), st.integers(0, 79))
def test_a_decode_step_grows_with_every_context_and_sequence(model, contexts, more, index):
    gpu = ComputeModel(model, H800)
    step_s = gpu.decode_step_s(contexts)
    longer = list(contexts)
    longer[index % len(longer)] += more
    assert gpu.decode_step_s(longer) >= step_s
    assert gpu.decode_step_s([*contexts, more]) >= step_s


@given(models, lengths, some, st.integers(0, 4999))
def test_a_chunked_prefill_never_costs_less_attention(model, cached, new, at):
    gpu = ComputeModel(model, H800)
    first = at % new
    chunks = gpu.prefill_attention_s(cached, first) + gpu.prefill_attention_s(cached + first, new - first)
    assert chunks >= gpu.prefill_attention_s(cached, new) * (1 - 1e-9)


def test_thresholds_are_three_and_five_seconds():
    derived = thresholds(read_tokens_per_s=1000.9, prefill_tokens_per_s=200.0)
    assert (derived.alpha, derived.beta, derived.quota_s) == (3002, 1000, 0.3)
    assert thresholds(0.0, 0.0).alpha == 1


def test_unknown_hardware_is_named_with_those_there_are():
    assert get_hardware("h100").flops_8bit == 1979e12
    with pytest.raises(ConfigError, match=r"'tpu'.*h800, h100"):
        get_hardware("tpu")
