"""Rotary position embedding: the frequencies of each kind that a checkpoint may name, and turning by them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.model import ModelDirectory

#: Their frequencies depend on the whole sequence's length: KV of a prefix would change as the sequence grows.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


class Rope:
    """Angles of tokens' positions, for turn()."""

    def __init__(self, model: ModelDirectory, device: torch.device) -> None:
        """ConfigError if the model's kind cannot be served or lacks a parameter."""
        try:
            frequencies, self._scale = read_frequencies(model.config, model.manifest.geometry.parts[0].width)
        except ConfigError as error:
            raise ConfigError(f"model {model.path} {error}") from None
        self._frequencies = frequencies.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, head_dim] for positions [T]."""
        half = positions[:, None].float() * self._frequencies
        whole = torch.cat((half, half), dim=-1)
        return (whole.cos() * self._scale).to(dtype), (whole.sin() * self._scale).to(dtype)


def turn(rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """rows [heads, T, head_dim] by angles [T, head_dim]; dimension i turns together with i + head_dim / 2."""
    cosines, sines = angles
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat((-second, first), dim=-1) * sines


def read_frequencies(config: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Of a model's configuration: radians a position for each pair of dimensions [head_dim / 2], float32, and what
    cosines and sines are multiplied by. ConfigError, in words that follow the model's name."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in _LENGTH_DEPENDENT:
        raise ConfigError(f"uses {kind!r} RoPE: KV of a prefix depends on what follows it")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"uses {kind!r} RoPE, which is not supported")
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("turns a part of each head's dimensions only, which is not supported")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if kind == "default":
        return plain, 1.0
    trained = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    trained = trained or config["max_position_embeddings"]
    try:
        if kind == "linear":
            return plain / float(rope["factor"]), 1.0
        if kind == "llama3":
            return _llama3(plain, rope, trained), 1.0
        factor = rope.get("factor") or config["max_position_embeddings"] / trained
        return _yarn(plain, rope, trained, factor, theta), _yarn_scale(rope, factor)
    except KeyError as missing:
        raise ConfigError(f"uses {kind!r} RoPE without {missing.args[0]}") from None


def _llama3(plain: Tensor, rope: dict[str, Any], trained: int) -> Tensor:
    """Pairs that turn often within the trained context keep their pace, those that hardly turn are slowed down by the
    factor, with a ramp between."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = trained * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    slowed = plain / float(rope["factor"])
    return (1 - kept) * slowed + kept * plain


def _yarn(plain: Tensor, rope: dict[str, Any], trained: int, factor: float, theta: float) -> Tensor:
    """The same with a ramp over dimensions."""
    head_dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        """Of the pair that turns so often within the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretched = ((torch.arange(len(plain)).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretched * plain / factor + (1 - stretched) * plain


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
