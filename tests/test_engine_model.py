"""Our layerwise forward equals transformers: whole, chunked, packed, on moved KV, in pages; and wrong KV shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from common.errors import ConfigError
from common.model import read_model_directory
from services.engine.torch_backend.attention import causal_mask, group_by_length
from services.engine.torch_backend.model import LayeredModel
from services.engine.torch_backend.reference import Reference
from tests.engine_harness import CPU, Engine, Staged, random_tokens
from tests.models import EOS_ID, FAMILIES, tiny_model

ROUNDING = 2e-4  # logits have a standard deviation of about 1.6


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), request.param)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory, threads=1)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    engine = Engine(directory, budget=4 << 20)
    yield engine
    engine.memory.close()


def in_chunks(engine: Engine, staged: Staged, sizes: list[int]) -> torch.Tensor:
    return torch.cat([engine.prefill([(staged, size)]) for size in sizes])


@pytest.mark.parametrize("sizes", [[300], [1, 63, 65, 2, 1, 100, 68], [128, 172]], ids=str)
def test_prefill_in_chunks_equals_transformers(engine: Engine, reference: Reference, sizes: list[int]) -> None:
    tokens = random_tokens(300)
    logits = in_chunks(engine, engine.stage(tokens), sizes)
    torch.testing.assert_close(logits, reference.logits(tokens), atol=ROUNDING, rtol=0)


def test_sequences_packed_in_one_forward_do_not_see_one_another(engine: Engine, reference: Reference) -> None:
    prompts = [random_tokens(count, seed=count) for count in (1, 65, 129, 40)]
    staged = [engine.stage(prompt) for prompt in prompts]
    in_chunks(engine, staged[1], [64])  # hit KV of one block
    in_chunks(engine, staged[2], [128])  # all but the last token
    news = [len(sequence.tokens) - sequence.computed for sequence in staged]
    logits = engine.prefill(list(zip(staged, news, strict=True))).split(news)
    for prompt, new, ours in zip(prompts, news, logits, strict=True):
        torch.testing.assert_close(ours, reference.logits(prompt)[-new:], atol=ROUNDING, rtol=0)


def test_memory_for_two_layers_of_a_context_serves_it(directory: Path, reference: Reference) -> None:
    tokens = random_tokens(500)
    engine = Engine(directory, budget=500 * 2 * 2 * 2 * 16 * 4)
    geometry = engine.geometry
    assert engine.memory.budget == 2 * 500 * geometry.row_bytes == 500 * geometry.bytes_per_token // 2
    logits = in_chunks(engine, engine.stage(tokens), [333, 167])
    torch.testing.assert_close(logits, reference.logits(tokens), atol=ROUNDING, rtol=0)
    assert engine.memory.peak_bytes == engine.memory.budget
    with pytest.raises(RuntimeError, match="do not fit"):
        engine.prefill([(engine.stage(random_tokens(501)), 501)])
    engine.memory.close()


def test_more_slots_change_nothing(engine: Engine) -> None:
    tokens = random_tokens(100)
    few, many = (engine.prefill([(engine.stage(tokens), 100)], num_slots) for num_slots in (2, 4))
    assert torch.equal(few, many)


def test_decode_equals_generate_token_for_token(engine: Engine, reference: Reference) -> None:
    prompts = [random_tokens(count, seed=count) for count in (1, 5, 62, 63, 64, 65, 300)]
    expected = [reference.greedy(prompt, 71) for prompt in prompts]
    batch = [engine.prefill_whole(prompt) for prompt in prompts]
    assert engine.decode(batch, 70) == expected
    assert engine.decode(batch[::-1], 70, seed=1) == expected[::-1], "order or pages changed tokens"
    for sequence, tokens in zip(batch, expected, strict=True):
        assert engine.decode([sequence], 70) == [tokens], "alone or batched changed tokens"


def test_decode_goes_on_from_blocks_that_were_moved(engine: Engine, reference: Reference) -> None:
    tokens = random_tokens(150)
    source, _ = engine.prefill_whole(tokens)
    moved = engine.stage(tokens)
    for block, other in zip(moved.blocks, source.blocks, strict=True):
        block.view(torch.uint8).copy_(other.view(torch.uint8))
    moved.computed = 128
    first = int(engine.prefill([(moved, 22)])[-1].argmax())
    assert engine.decode([(moved, first)], 20) == [reference.greedy(tokens, 21)]


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("part", [0, 1])  # K, V
def test_one_wrong_byte_of_cached_kv_changes_tokens(
    engine: Engine, reference: Reference, layer: int, part: int
) -> None:
    tokens = random_tokens(150)
    staged = engine.stage(tokens)
    engine.prefill([(staged, 128)])
    row = staged.blocks[1, layer, 17].view(torch.uint8)
    row[part * engine.geometry.row_bytes // 2 + 3] ^= 0x40  # the highest bit of an exponent
    logits = engine.prefill([(staged, 22)])
    difference = (logits - reference.logits(tokens)[-22:]).abs().amax(dim=-1)
    assert not (difference < 10 * ROUNDING).all()  # not a number is a difference, too
    output = engine.decode([(staged, int(logits[-1].argmax()))], 40)
    assert output != [reference.greedy(tokens, 41)]


def test_bfloat16_stays_near_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    engine = Engine(directory, budget=1 << 20, dtype="bfloat16")
    tokens = random_tokens(150)
    staged = engine.stage(tokens)
    logits = in_chunks(engine, staged, [70, 80])
    expected = Reference(directory, "bfloat16", threads=1).logits(tokens)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    assert len(engine.decode([(staged, int(logits[-1].argmax()))], 3)[0]) == 4
    engine.memory.close()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.1}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "truncate": False}}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, **MSCALE}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ],
    ids=str,
)
def test_what_a_configuration_may_ask_for_equals_transformers(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = tiny_model(tmp_path, family, **settings)
    if "rope_parameters" not in settings:
        with_biases(directory)
    engine = Engine(directory, budget=4 << 20)
    tokens = random_tokens(300)
    logits = engine.prefill([(engine.stage(tokens), 300)])
    torch.testing.assert_close(logits, Reference(directory, threads=1).logits(tokens), atol=ROUNDING, rtol=0)
    engine.memory.close()


def with_biases(directory: Path) -> None:
    """transformers begins them, and norms, with values that change nothing."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() == 1:
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    save_file(weights, file, {"format": "pt"})


def test_settings_as_older_checkpoints_write_them(tmp_path: Path) -> None:
    new = tiny_model(tmp_path / "new", "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    old = tmp_path / "old"
    old.mkdir()
    edited_copy(old, new, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    tokens = random_tokens(300)
    engine = Engine(old, budget=4 << 20)
    logits = engine.prefill([(engine.stage(tokens), 300)])
    torch.testing.assert_close(logits, Reference(new, threads=1).logits(tokens), atol=ROUNDING, rtol=0)
    engine.memory.close()


@pytest.mark.parametrize(("new", "total"), [(1, 9), (9, 9), (3, 9), (8, 9)])
def test_the_mask_is_the_same_on_every_device(new: int, total: int) -> None:
    query, key = torch.randn(1, 1, new, 8), torch.randn(1, 1, total, 8)
    allowed = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    expected = scaled_dot_product_attention(query, key, key, attn_mask=allowed)
    for device in ("cpu", "meta"):
        mask = causal_mask(new, total, torch.empty(0, device=device))
        ours = scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=mask is None and new > 1)
        torch.testing.assert_close(ours, expected)


def test_groups_hold_like_lengths() -> None:
    assert group_by_length([1, 100, 64, 127, 2, 3, 5000]) == [[0], [1, 2, 3], [4, 5], [6]]


def edited_copy(tmp_path: Path, source: Path, **changes: object) -> Path:
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return tmp_path


class TestLoading:
    @pytest.fixture
    def qwen(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.getbasetemp(), "qwen2")

    def refused(self, path: Path, because: str) -> None:
        with pytest.raises(ConfigError, match=because):
            LayeredModel.load(read_model_directory(path, "float32", 64), CPU, threads=1)

    def test_end_tokens(self, qwen: Path, tmp_path: Path) -> None:
        path = edited_copy(tmp_path, qwen)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
        assert LayeredModel.load(read_model_directory(path, "float32", 64), CPU, 1).eos_token_ids == {7, 9}
        (path / "generation_config.json").unlink()
        assert LayeredModel.load(read_model_directory(path, "float32", 64), CPU, 1).eos_token_ids == {EOS_ID}

    def test_sliding_window_is_refused(self, qwen: Path, tmp_path: Path) -> None:
        self.refused(edited_copy(tmp_path, qwen, use_sliding_window=True, sliding_window=64), "sliding-window")

    def test_rope_that_depends_on_the_length_is_refused(self, qwen: Path, tmp_path: Path) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        self.refused(edited_copy(tmp_path, qwen, rope_parameters=rope), "'dynamic' RoPE")

    @pytest.mark.parametrize("name", ["num_attention_heads", "vocab_size"])
    def test_a_configuration_that_lacks_a_size_is_refused(self, name: str, qwen: Path, tmp_path: Path) -> None:
        path = edited_copy(tmp_path, qwen)
        config = json.loads((path / "config.json").read_text())
        del config[name]
        (path / "config.json").write_text(json.dumps(config))
        self.refused(path, f"config.json has no {name}")

    def test_missing_weights_are_refused(self, qwen: Path, tmp_path: Path) -> None:
        path = edited_copy(tmp_path, qwen, num_hidden_layers=5, layer_types=["full_attention"] * 5)
        self.refused(path, "lacks 1. weights, the first is model.layers.4")

    def test_broken_weights_are_refused(self, qwen: Path, tmp_path: Path) -> None:
        path = edited_copy(tmp_path, qwen)
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:1000])
        self.refused(path, "does not load")
