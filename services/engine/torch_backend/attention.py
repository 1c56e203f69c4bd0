"""Attention over KV that this project keeps: rows of a layer slot (prefill) or pages (decode).

A row is K then V of one token in one layer (common.blocks.geometry). Both classes serve one forward: they put the new
tokens' rows where they belong and attend over cached and new rows. Cached KV is never converted or repeated per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from common.messages import SequenceSlice


class KVAccess(Protocol):
    """What a layer's attention needs of the KV-cache; one object a forward."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new KV and attend. query [heads, T, head_dim], key and value [kv_heads, T, head_dim], after RoPE.

        Returns [T, heads, head_dim].
        """


class PackedAttention:
    """Prefill: sequences one after the other in the token axis, each attending causally over its own rows.

    slots: of each sequence, [rows, row_elems] each; layer l lives in slots[l % len(slots)], where rows [row, row +
    cached) of the sequence hold its cached KV before attend(l) and rows [row + cached, row + cached + new) its new KV
    afterwards.
    """

    def __init__(self, sequences: Sequence[SequenceSlice], slots: Sequence[Sequence[Tensor]]) -> None:
        self._sequences = sequences
        self._slots = slots
        self._masks = [causal_mask(s.new, s.cached + s.new, own[0]) for s, own in zip(sequences, slots, strict=True)]

    def positions(self) -> Tensor:
        """[T] int64: the position of each packed token in its sequence."""
        return torch.cat([torch.arange(s.cached, s.cached + s.new) for s in self._sequences])

    def last_tokens(self) -> Tensor:
        """[number of sequences] int64: where each sequence's last token is in the token axis."""
        return torch.tensor([s.new for s in self._sequences]).cumsum(0) - 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        kv_heads, num_tokens, head_dim = key.shape
        output = query.new_empty(num_tokens, query.shape[0], head_dim)
        start = 0
        for sequence, slots, mask in zip(self._sequences, self._slots, self._masks, strict=True):
            keys, values = split_rows(slots[layer % len(slots)], kv_heads, head_dim)
            stop = start + sequence.new
            cached_end = sequence.row + sequence.cached
            rows = slice(sequence.row, cached_end + sequence.new)
            keys[:, cached_end : rows.stop] = key[:, start:stop]
            values[:, cached_end : rows.stop] = value[:, start:stop]
            output[start:stop] = scaled_dot_product_attention(
                query[None, :, start:stop],
                keys[None, :, rows],
                values[None, :, rows],
                attn_mask=mask,
                is_causal=mask is None and sequence.new > 1,
                scale=scaling,
                enable_gqa=True,
            )[0].transpose(0, 1)
            start = stop
        return output


class PagedAttention:
    """Decode: one new token for each of B sequences, whose KV is spread over pages.

    pages [P, num_layers, block_size, row_elems]. page_table [B, max_pages] int64: the pages of each sequence in order,
    padded with anything. lengths [B] int64: tokens in cache with the new one. Both tables may be on the CPU.
    """

    def __init__(self, pages: Tensor, page_table: Tensor, lengths: Tensor) -> None:
        num_layers, self._block_size = pages.shape[1:3]
        self._rows = pages.flatten(0, 2)
        self._groups = [
            _Group.build(index, page_table, lengths, num_layers, self._block_size, pages)
            for index in group_by_length(lengths.tolist())
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        kv_heads, num_tokens, head_dim = key.shape
        new = torch.cat([key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)], dim=1)
        query = query.transpose(0, 1).reshape(num_tokens, kv_heads, -1, head_dim)
        output = torch.empty_like(query)
        for group in self._groups:
            rows = group.rows + layer * self._block_size
            self._rows.index_copy_(0, rows[:, -1], new[group.index])
            context = self._rows.index_select(0, rows.flatten()).view(*rows.shape, -1)
            keys, values = split_rows(context, kv_heads, head_dim)
            # the query heads of one KV head stand in the query axis, so that grouped queries need no repeated KV
            output[group.index] = scaled_dot_product_attention(
                query[group.index], keys, values, attn_mask=group.mask, scale=scaling
            )
        return output.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of one group: index [b] in the batch; rows [b, longest]: row of each position in layer 0; mask."""

    index: Tensor
    rows: Tensor
    mask: Tensor | None

    @classmethod
    def build(
        cls, index: list[int], page_table: Tensor, lengths: Tensor, num_layers: int, block_size: int, pages: Tensor
    ) -> _Group:
        lengths = lengths[index, None]
        positions = torch.arange(int(lengths.max()))
        # Positions past a sequence's end read its last row, so that no byte of anybody else's is ever touched: a mask
        # alone would let a stale NaN through. The last column is thus the new token's row in every sequence.
        clamped = torch.minimum(positions, lengths - 1)
        rows = page_table[index].gather(1, clamped // block_size) * (num_layers * block_size) + clamped % block_size
        mask = None
        if (lengths != lengths[0]).any():
            mask = torch.zeros(rows.shape, dtype=pages.dtype).masked_fill_(positions >= lengths, float("-inf"))
            mask = mask[:, None, None].to(pages.device)
        return cls(torch.tensor(index).to(pages.device), rows.to(pages.device), mask)


def split_rows(rows: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """[..., n, row_elems] -> views of K and of V, [..., kv_heads, n, head_dim] each."""
    keys, values = rows.view(*rows.shape[:-1], 2, kv_heads, head_dim).unbind(-3)
    return keys.transpose(-3, -2), values.transpose(-3, -2)


def causal_mask(new: int, total: int, like: Tensor) -> Tensor | None:
    """The last `new` of `total` tokens attend to all up to themselves; None where SDPA's own causal flag says so.

    On a CPU it is built once a forward, because SDPA would build it for each layer; elsewhere kernels know the shape.
    """
    if new in {1, total}:
        return None
    if like.device.type != "cpu":
        return causal_lower_right(new, total)
    return torch.full((new, total), float("-inf"), dtype=like.dtype).triu_(total - new + 1)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indexes of sequences of like length (the same power of two): padding a group at most doubles what is read."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length.bit_length(), []).append(index)
    return list(groups.values())
