"""A transformers checkpoint run layer by layer, on KV-cache that the caller keeps (paper §4.1: layerwise prefill).

transformers' own modules compute everything but the attention itself, for which one function is registered; the KV of a
forward reaches it as a keyword that the decoder layers hand through. No cache object of transformers is involved, so
nothing but the caller's rows ever holds KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from common.errors import ConfigError
from common.model import ModelDirectory
from services.engine.torch_backend.attention import KVAccess

_transformers: Any = transformers  # much of it has no annotations, or wrong ones
ATTENTION = "dualpath"
#: RoPE whose frequencies depend on the whole sequence's length: KV of a prefix would change as the sequence grows.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: KVAccess,
    **_unused: object,
) -> tuple[Tensor, None]:
    layer: Any = module.layer_idx
    return kv.attend(layer, query[0], key[0], value[0], scaling).unsqueeze(0), None


_transformers.AttentionInterface.register(ATTENTION, _attention)


@dataclass(slots=True)
class State:
    """A forward on its way through the layers: hidden [1, T, hidden_size], and RoPE's cosines and sines."""

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]


class LayeredModel:
    """embed -> run_layer for each layer in order -> logits. One thread at a time; any number of forwards interleave.

    eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self.num_layers: int = model.config.num_hidden_layers
        self.eos_token_ids = _token_ids(model.generation_config.eos_token_id) or _token_ids(model.config.eos_token_id)
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()

    @classmethod
    def load(cls, directory: ModelDirectory, device: torch.device, threads: int = 0) -> LayeredModel:
        """Load weights in the dtype of the directory's geometry. ConfigError if the model cannot be served.

        threads: of torch in this process; 0 leaves torch's choice.
        """
        if threads:
            torch.set_num_threads(threads)
        _transformers.logging.disable_progress_bar()
        path = directory.path
        try:
            config = _transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            _check_config(config, directory)
            model, info = _transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, directory.manifest.geometry.parts[0].dtype),
                attn_implementation=ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"model directory {path} does not load: {str(error).splitlines()[0]}") from error
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(f"model directory {path} lacks {len(missing)} weights, the first is {missing[0]}")
        return cls(model.to(device).eval(), device)

    @torch.inference_mode()
    def embed(self, tokens: Tensor, positions: Tensor) -> State:
        """The state before layer 0. tokens [T] int64; positions [T] int64: each token's place in its own sequence."""
        hidden = self._decoder.embed_tokens(tokens.to(self.device))[None]
        return State(hidden, self._decoder.rotary_emb(hidden, positions.to(self.device)[None]))

    @torch.inference_mode()
    def run_layer(self, layer: int, state: State, kv: KVAccess) -> None:
        """Advance state by one layer."""
        state.hidden = self._decoder.layers[layer](state.hidden, position_embeddings=state.rotary, kv=kv)

    @torch.inference_mode()
    def logits(self, state: State, rows: Tensor) -> Tensor:
        """[n, vocab] float32: the logits after tokens rows [n] int64 of the forward, once every layer has run."""
        logits: Tensor = self._head(self._decoder.norm(state.hidden[0, rows.to(self.device)]))
        return logits.float()


def _check_config(config: Any, directory: ModelDirectory) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "use_sliding_window", False) or layer_types - {"full_attention"}:
        raise ConfigError(f"model {directory.path} uses sliding-window attention, which is not supported")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(f"model {directory.path} uses {rope_type!r} RoPE: KV of a prefix depends on what follows it")


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
