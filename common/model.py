"""What a model directory says about KV-cache, read without torch: geometry, limits, and the namespace of its blocks.

KV bytes depend on more than tokens: weights, RoPE, layer count, heads, dtype, block size. All of it goes into the
manifest, whose digest is the namespace of every block key (design: Storage), so KV of another model is never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.blocks.geometry import DTYPE_BYTES, BlockGeometry, attention_geometry
from common.config import Config, ModelConfig
from common.errors import ConfigError
from common.perf.hardware import get_hardware
from common.perf.models import get_model_profile
from common.perf.scaling import Scaling
from common.wire import message

#: Version of the block layout and of the key derivation.
FORMAT_VERSION = 1
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@message
@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that KV bytes depend on besides tokens. Equal manifests may share blocks."""

    format_version: int
    model_digest: str
    geometry: BlockGeometry

    @property
    def namespace(self) -> bytes:
        """Digest over the manifest: the root of every block key."""
        parts = [f"{part.name}:{part.heads}:{part.width}:{part.dtype}" for part in self.geometry.parts]
        text = "\n".join(
            [
                f"dualpath blocks {self.format_version}",
                self.model_digest,
                f"{self.geometry.num_layers} layers, {self.geometry.block_size} tokens",
                *parts,
            ]
        )
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    def difference(self, other: Manifest) -> str | None:
        """The first field in which two manifests differ, for an error message, or None."""
        for name in ("format_version", "model_digest"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} != {getattr(other, name)}"
        for name in ("num_layers", "block_size", "parts"):
            if getattr(self.geometry, name) != getattr(other.geometry, name):
                return f"geometry.{name}: {getattr(self.geometry, name)} != {getattr(other.geometry, name)}"
        return None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What every process needs to know of the model."""

    manifest: Manifest
    max_context_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelDirectory(ModelInfo):
    """A checked model directory in the usual format (config.json, safetensors, tokenizer.json)."""

    path: Path
    architecture: str
    config: dict[str, Any]


def read_model_directory(path: Path, dtype: str, block_size: int, digest: str | None = None) -> ModelDirectory:
    """Read and check a model directory. ConfigError, naming what is missing, if it cannot be served.

    dtype: name of a torch dtype, or "auto" for the checkpoint's own. digest: the weights' digest, if already known.
    """
    if not path.is_dir():
        raise ConfigError(f"model directory {path} does not exist: give a directory or a hub id with --model")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"model directory {path} has no {name}: save the model with save_pretrained()")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model directory {path} has no weights (*.safetensors): save it with save_pretrained()")
    try:
        config = json.loads((path / "config.json").read_text())
        architecture = ARCHITECTURES[config["architectures"][0]]
    except OSError as error:
        raise ConfigError(f"cannot read {path / 'config.json'}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path / 'config.json'} names no supported architecture: one of {known}") from None
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"model.dtype {dtype!r} is unknown: one of auto, {', '.join(DTYPE_BYTES)}")
    try:
        heads = config["num_attention_heads"]
        geometry = attention_geometry(
            num_layers=config["num_hidden_layers"],
            block_size=block_size,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            dtype=dtype,
        )
        limits = {"max_context_tokens": config["max_position_embeddings"], "vocab_size": config["vocab_size"]}
    except KeyError as missing:
        raise ConfigError(f"{path / 'config.json'} has no {missing.args[0]}") from None
    manifest = Manifest(FORMAT_VERSION, digest or weights_digest(path), geometry)
    return ModelDirectory(path=path, architecture=architecture, config=config, manifest=manifest, **limits)


def read_configured_directory(model: ModelConfig) -> ModelDirectory:
    """read_model_directory() of what the configuration names."""
    return read_model_directory(Path(model.path), model.dtype, model.block_size, model.digest)


def read_configured_model(config: Config) -> ModelInfo:
    """What the configuration names: a model directory, or a profiled model, whose KV moves in a geometry of its own.
    ConfigError if there is none."""
    if not config.model.profile:
        return read_configured_directory(config.model)
    scaling = configured_scaling(config)
    profile, geometry = scaling.model, scaling.geometry(config.model.block_size)
    manifest = Manifest(FORMAT_VERSION, f"profile {profile.name}", geometry)
    return ModelInfo(manifest, profile.max_context_tokens, profile.vocab_size)


def configured_scaling(config: Config) -> Scaling:
    """How a profiled model's cluster is scaled. ConfigError if the model or the hardware is unknown, or a node of it is
    smaller than an engine."""
    perf = config.perf
    hardware = get_hardware(perf.hardware)
    if perf.gpus > hardware.gpus:
        raise ConfigError(f"perf.gpus {perf.gpus}: a node of {perf.hardware} has {hardware.gpus}, an engine is on one")
    return Scaling(
        get_model_profile(config.model.profile),
        hardware,
        perf.gpus,
        perf.time_factor,
        perf.moved_layers,
        perf.row_bytes,
    )


def checked_digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> str:
    """The digest of a model directory. ConfigError if it cannot be served."""
    read_model_directory(path, "auto", block_size=64, digest="not known yet")
    return weights_digest(path, wanted)


def weights_digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> str:
    """Digest of config.json and all weight files, by name and content (xxh3-128: reads as fast as memory). ConfigError
    if one cannot be read. wanted: asked often; once it says no, what is returned is of no use."""
    digest = xxhash.xxh3_128()
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        digest.update(file.name.encode() + b"\0")
        try:
            with file.open("rb") as stream:
                while wanted() and (chunk := stream.read(8 << 20)):
                    digest.update(chunk)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    return str(digest.hexdigest())
