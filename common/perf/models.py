"""What compute and KV-cache of the paper's models cost: FLOPs and bytes from their shapes.

Attention over a context of which `cached` tokens have KV and `new` are computed is counted as the area under "how many
positions does a token attend to": new * cached + new^2 / 2, or less where a sparse selection caps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.errors import ConfigError


class AttentionFlops(NamedTuple):
    """Floating-point operations of one layer. indexer: what selects the positions of sparse attention, in 8 bits."""

    attention: float
    indexer: float = 0.0


class Attention(Protocol):
    """The attention of one layer: FLOPs, bytes of a token's KV, bytes of its index key (kept, but not moved), and bytes
    of both that a forward has to read. costs: (cached, new) -> FLOPs of attention and indexer, and those bytes, for
    whoever asks often."""

    @property
    def kind(self) -> str: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    def flops(self, cached: float, new: float) -> AttentionFlops: ...
    def read_bytes(self, cached: float, new: float) -> float: ...
    @property
    def costs(self) -> Costs: ...


Costs = Callable[[float, float], tuple[float, float, float]]


def attended(cached: float, new: float, top_k: float | None = None) -> float:
    """Positions that `new` tokens after `cached` ones attend to, in sum; none of them more than top_k."""
    total = cached + new
    if top_k is None or total <= top_k:
        return (total * total - cached * cached) / 2
    if cached >= top_k:
        return top_k * new
    return top_k * (total - top_k / 2) - cached * cached / 2


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """heads query heads that share kv_heads pairs of K and V; row = K then V."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    kind: str = "gqa"

    @property
    def row_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def index_bytes(self) -> int:
        return 0

    def flops(self, cached: float, new: float) -> AttentionFlops:
        return AttentionFlops(4 * self.heads * self.head_dim * attended(cached, new))

    def read_bytes(self, cached: float, new: float) -> float:
        return float((cached + new) * self.row_bytes)

    @property
    def costs(self) -> Costs:
        return lambda cached, new: (*self.flops(cached, new), self.read_bytes(cached, new))


@dataclass(frozen=True, slots=True)
class Indexer:
    """DSA's selection: heads score every earlier position on head_dim numbers; attention sees the top_k best.

    row_bytes: one token's index key, which stays with the engine's KV but is not among the bytes that a profile moves.
    """

    heads: int
    head_dim: int
    top_k: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA with absorbed projections: all heads attend to one latent and one RoPE key a token; with an indexer, DSA."""

    heads: int
    latent: int
    rope: int
    row_bytes: int
    indexer: Indexer | None = None

    @property
    def kind(self) -> str:
        return "mla" if self.indexer is None else "dsa"

    @property
    def index_bytes(self) -> int:
        return 0 if self.indexer is None else self.indexer.row_bytes

    def flops(self, cached: float, new: float) -> AttentionFlops:
        a_position = 2 * self.heads * (2 * self.latent + self.rope)  # score: latent + rope; output: latent
        if self.indexer is None:
            return AttentionFlops(a_position * attended(cached, new))
        return AttentionFlops(
            a_position * attended(cached, new, self.indexer.top_k),
            2 * self.indexer.heads * self.indexer.head_dim * attended(cached, new),
        )

    def read_bytes(self, cached: float, new: float) -> float:
        context = cached + new
        if self.indexer is None:
            return float(context * self.row_bytes)
        return float(context * self.indexer.row_bytes + min(context, new * self.indexer.top_k) * self.row_bytes)

    @property
    def costs(self) -> Costs:
        indexer, row_bytes = self.indexer, self.row_bytes
        if indexer is None:
            return lambda cached, new: (*self.flops(cached, new), self.read_bytes(cached, new))
        top_k, key_bytes = indexer.top_k, indexer.row_bytes
        a_position = 2 * self.heads * (2 * self.latent + self.rope)
        a_score = 2 * indexer.heads * indexer.head_dim

        def costs(cached: float, new: float) -> tuple[float, float, float]:
            total = cached + new
            scored = (total * total - cached * cached) / 2
            chosen = top_k * new if cached >= top_k else attended(cached, new, top_k)
            rows = new * top_k
            read = total * key_bytes + (rows if rows < total else total) * row_bytes
            return a_position * chosen, a_score * scored, read

        return costs


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model, and how the paper deploys it.

    active_params: weights that a token meets in linear layers (2 FLOPs each). Weights have 8 bits: shared_params are
    in every GPU, expert_params spread over expert_gpus GPUs. dram_bytes: staging DRAM of a node. prefill_kv_bytes: HBM
    of a GPU that prefills for the KV of its batch, which bounds Basic (spec §9).
    """

    name: str
    layers: int
    attention: Attention
    active_params: float
    shared_params: float
    expert_params: float
    vocab_size: int
    max_context_tokens: int
    expert_gpus: int
    dram_bytes: float
    prefill_kv_bytes: float

    @property
    def kv_bytes_per_token(self) -> int:
        """What storage holds and what moves."""
        return self.layers * self.attention.row_bytes

    @property
    def resident_bytes_per_token(self) -> int:
        """What a token takes in the memory of a GPU that decodes: index keys as well."""
        return self.layers * (self.attention.row_bytes + self.attention.index_bytes)

    @property
    def weight_bytes_a_gpu(self) -> float:
        """Bytes of weights in one GPU's memory, all of which a step reads: with many tokens in the expert group, every
        expert gets some."""
        return self.shared_params + self.expert_params / self.expert_gpus

    def linear_flops(self, tokens: float) -> float:
        return 2 * self.active_params * tokens

    def attention_flops(self, cached: float, new: float) -> AttentionFlops:
        """All layers."""
        layer = self.attention.flops(cached, new)
        return AttentionFlops(self.layers * layer.attention, self.layers * layer.indexer)

    def flops(self, cached: int, new: int) -> float:
        """All of a prefill of `new` tokens after `cached` ones."""
        attention = self.attention_flops(cached, new)
        return self.linear_flops(new) + attention.attention + attention.indexer


#: One token's KV in one layer of MLA in FP8: 512 latent, 16 of scales, 64 BF16 numbers of RoPE.
_MLA_ROW_BYTES = 512 + 16 + 128

DS_660B = ModelProfile(
    name="ds-660b",  # DeepSeek V3.2
    layers=61,
    attention=LatentAttention(128, 512, 64, _MLA_ROW_BYTES, Indexer(64, 128, 2048, 128 + 4)),
    active_params=37e9,  # embeddings and head included: 74 GFLOP a token
    shared_params=18e9,  # attention 11.4, indexers 0.9, dense layers 1.2, shared experts 2.6, embeddings and head 1.9
    expert_params=654e9,  # 58 layers x 256 experts x 3 x 7168 x 2048
    vocab_size=129_280,
    max_context_tokens=163_840,
    expert_gpus=32,  # the four decode nodes of 2P4D; the prefill group has 16
    dram_bytes=80e9,
    prefill_kv_bytes=4e9,  # the paper does not say: 3 to 6 GB fit its layerwise step
)

DS_27B = ModelProfile(
    name="ds-27b",
    layers=30,
    attention=LatentAttention(32, 512, 64, _MLA_ROW_BYTES, Indexer(32, 64, 1024, 64 + 4)),  # sizes of MLA assumed
    active_params=3.96e9,
    shared_params=2.7e9,  # attention 1.0, indexers 0.2, dense layer 0.1, shared experts 0.7, embeddings and head 0.7
    expert_params=24.6e9,  # 29 layers x 72 experts x 3 x 2560 x 1536
    vocab_size=129_280,  # assumed, as is the next: those of ds-660b
    max_context_tokens=163_840,
    expert_gpus=8,
    dram_bytes=80e9,
    prefill_kv_bytes=4e9,
)

QWEN_32B = ModelProfile(
    name="qwen-32b",  # Qwen2.5-32B, KV in FP16, data-parallel: every GPU has all weights
    layers=64,
    attention=GroupedQueryAttention(heads=40, kv_heads=8, head_dim=128, element_bytes=2),
    active_params=32.0e9,  # without the embedding
    shared_params=32.8e9,  # in 8 bits: assumed, since 16 would leave a GPU no room for one context of 32K tokens
    expert_params=0.0,
    vocab_size=152_064,
    max_context_tokens=131_072,
    expert_gpus=1,
    dram_bytes=320e9,
    prefill_kv_bytes=20e9,  # assumed: one request of 64K tokens has to fit
)

MODELS = {model.name: model for model in (DS_660B, DS_27B, QWEN_32B)}


def get_model_profile(name: str) -> ModelProfile:
    """ConfigError if no model has this name."""
    try:
        return MODELS[name]
    except KeyError:
        raise ConfigError(f"model.profile {name!r} is unknown: one of {', '.join(MODELS)}") from None
