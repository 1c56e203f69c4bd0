"""The one byte layout of KV-cache (paper §2; spec §2).

A token's KV in one layer is a row: its parts (K and V; or an MLA latent, its RoPE key and an indexer key) one after the
other. A Layer Block is block_size rows of one layer, [1, block_size, row_bytes]. A Full Block is the Layer Blocks of
all layers in order, [num_layers, block_size, row_bytes]. Both are contiguous, so a Layer Block is a slice of its Full
Block and no path ever converts a layout.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class RowPart:
    """One named tensor of a token's row: [heads, width] elements of dtype."""

    name: str
    heads: int
    width: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.heads * self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Sizes of rows, Layer Blocks and Full Blocks, in bytes."""

    num_layers: int
    block_size: int
    parts: tuple[RowPart, ...]

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.block_size < 1 or not self.parts:
            raise ValueError("a block needs at least one layer, one token and one part")
        unknown = [part.dtype for part in self.parts if part.dtype not in DTYPE_BYTES]
        if unknown:
            raise ValueError(f"unknown dtype {unknown[0]!r}; known: {', '.join(sorted(DTYPE_BYTES))}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer (the paper's bytes_per_layer)."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.row_bytes

    @property
    def layer_block_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def full_block_bytes(self) -> int:
        return self.num_layers * self.layer_block_bytes

    def layer_offset(self, layer: int) -> int:
        """Byte offset of a layer's Layer Block inside a Full Block."""
        return layer * self.layer_block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens, the partial tail block included."""
        return -(-num_tokens // self.block_size)


def attention_geometry(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: str) -> BlockGeometry:
    """Geometry of multi-head or grouped-query attention: a row is K then V."""
    return BlockGeometry(
        num_layers,
        block_size,
        (RowPart("k", kv_heads, head_dim, dtype), RowPart("v", kv_heads, head_dim, dtype)),
    )
