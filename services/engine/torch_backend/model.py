"""A checkpoint run layer by layer, on KV-cache that the caller keeps (paper §4.1: layerwise prefill).

The three families differ little: Qwen2 has biases before the attention, Qwen3 norms of queries and keys. What is
computed, and in which dtype, is what transformers computes (services.engine.torch_backend.reference holds it against
that), but for the attention, which is the caller's as well. transformers itself takes longer to import than all else
that an engine does to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, relu, silu

from common.errors import ConfigError
from common.model import ModelDirectory, end_tokens
from services.engine.torch_backend.attention import KVAccess, prepare
from services.engine.torch_backend.checkpoint import Shape, read_weights
from services.engine.torch_backend.rope import Rope, turn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


@dataclass(slots=True)
class State:
    """A forward on its way through the layers: hidden [T, hidden_size], and RoPE's cosines and sines [T, head_dim]."""

    hidden: Tensor
    angles: tuple[Tensor, Tensor]


class LayeredModel:
    """embed -> run_layer for each layer in order -> logits. One thread at a time; any number of forwards interleave.

    eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, directory: ModelDirectory, weights: dict[str, Tensor], rope: Rope, device: torch.device) -> None:
        config = directory.config
        self.device = device
        self.num_layers = directory.manifest.geometry.num_layers
        self.eos_token_ids = end_tokens(directory)
        self._weights = weights
        self._rope = rope
        self._head_dim = directory.manifest.geometry.parts[0].width
        self._epsilon = float(config.get("rms_norm_eps", 1e-6))
        self._activation = ACTIVATIONS[config.get("hidden_act", "silu")]
        self._head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]

    @classmethod
    def load(cls, directory: ModelDirectory, device: torch.device, threads: int = 0) -> LayeredModel:
        """Load weights in the dtype of the directory's geometry. ConfigError if the model cannot be served.

        threads: of torch in this process; 0 leaves torch's choice.
        """
        if threads:
            torch.set_num_threads(threads)
        _check_config(directory)
        prepare(device)
        rope = Rope(directory, device)
        dtype: torch.dtype = getattr(torch, directory.manifest.geometry.parts[0].dtype)
        return cls(directory, read_weights(directory.path, weight_shapes(directory), dtype, device), rope, device)

    @torch.inference_mode()
    def embed(self, tokens: Tensor, positions: Tensor) -> State:
        """The state before layer 0. tokens [T] int64; positions [T] int64: each token's place in its own sequence."""
        hidden = embedding(tokens.to(self.device), self._weights["model.embed_tokens.weight"])
        return State(hidden, self._rope.angles(positions.to(self.device), hidden.dtype))

    @torch.inference_mode()
    def run_layer(self, layer: int, state: State, kv: KVAccess) -> None:
        """Advance state by one layer."""
        prefix = f"model.layers.{layer}."
        normed = self._norm(state.hidden, f"{prefix}input_layernorm")
        hidden = state.hidden + self._attention(normed, state.angles, layer, kv, f"{prefix}self_attn.")
        normed = self._norm(hidden, f"{prefix}post_attention_layernorm")
        gate = self._activation(self._linear(normed, f"{prefix}mlp.gate_proj"))
        up = self._linear(normed, f"{prefix}mlp.up_proj")
        state.hidden = hidden + self._linear(gate * up, f"{prefix}mlp.down_proj")

    @torch.inference_mode()
    def logits(self, state: State, rows: Tensor) -> Tensor:
        """[n, vocab] float32: the logits after tokens rows [n] int64 of the forward, once every layer has run."""
        return linear(self._norm(state.hidden[rows.to(self.device)], "model.norm"), self._head).float()

    def _attention(
        self, normed: Tensor, angles: tuple[Tensor, Tensor], layer: int, kv: KVAccess, prefix: str
    ) -> Tensor:
        def heads(name: str) -> Tensor:
            """[heads, T, head_dim]"""
            rows = self._linear(normed, f"{prefix}{name}_proj").view(len(normed), -1, self._head_dim)
            return self._norm(rows, f"{prefix}{name}_norm", optional=True).transpose(0, 1)

        query, key = turn(heads("q"), angles), turn(heads("k"), angles)
        attended = kv.attend(layer, query, key, heads("v"), self._head_dim**-0.5)
        return self._linear(attended.flatten(1), f"{prefix}o_proj")

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return linear(rows, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, rows: Tensor, name: str, optional: bool = False) -> Tensor:
        """By the root of the mean square, in float32. optional: rows as they are in a model without this norm."""
        weight = self._weights.get(f"{name}.weight") if optional else self._weights[f"{name}.weight"]
        if weight is None:
            return rows
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return weight * normed.to(rows.dtype)


def weight_shapes(model: ModelDirectory) -> dict[str, Shape]:
    """Every weight of the model, by its name in the checkpoint."""
    config, geometry = model.config, model.manifest.geometry
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], geometry.parts[0].width
    queries, keys = config["num_attention_heads"] * head_dim, geometry.parts[0].heads * head_dim
    before, after = _attention_biases(model)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (model.vocab_size, hidden)

    def add(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for prefix in (f"model.layers.{layer}." for layer in range(geometry.num_layers)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            add(f"{prefix}self_attn.{name}_proj", outputs, hidden, before)
        add(f"{prefix}self_attn.o_proj", hidden, queries, after)
        if model.architecture == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
        mlp_bias = model.architecture == "llama" and bool(config.get("mlp_bias"))
        for name in ("gate", "up"):
            add(f"{prefix}mlp.{name}_proj", inner, hidden, mlp_bias)
        add(f"{prefix}mlp.down_proj", hidden, inner, mlp_bias)
    return shapes


def _attention_biases(model: ModelDirectory) -> tuple[bool, bool]:
    """Whether queries, keys and values have a bias, and whether what comes out has one."""
    if model.architecture == "qwen2":
        return True, False
    bias = bool(model.config.get("attention_bias"))
    return bias, bias


def _check_config(directory: ModelDirectory) -> None:
    config: dict[str, Any] = directory.config
    if missing := [name for name in ("hidden_size", "intermediate_size") if name not in config]:
        raise ConfigError(f"{directory.path / 'config.json'} has no {missing[0]}")
    if config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"model {directory.path} uses sliding-window attention, which is not supported")
    if config.get("quantization_config"):
        raise ConfigError(f"model {directory.path} is quantized, which is not supported: save it dequantized")
    if (name := config.get("hidden_act", "silu")) not in ACTIVATIONS:
        raise ConfigError(f"model {directory.path} has activation {name!r}: none of {', '.join(ACTIVATIONS)}")
