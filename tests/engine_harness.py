"""What prefill and decode engines do with the model, in one thread: staged Full Blocks in, tokens out.

Every byte of device memory that a forward has not been given is NaN, so reading a row too many shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.blocks.geometry import BlockGeometry
from common.messages import SequenceSlice
from common.model import ModelDirectory, read_model_directory
from services.engine.backend import Slots
from services.engine.torch_backend.attention import PackedAttention, PagedAttention
from services.engine.torch_backend.memory import TensorMemory
from services.engine.torch_backend.model import LayeredModel

CPU = torch.device("cpu")


@dataclass
class Staged:
    """A sequence with its Full Blocks in host memory [blocks, num_layers, block_size, row_elems].

    computed: tokens whose KV is there.
    """

    tokens: list[int]
    blocks: Tensor
    computed: int = 0

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, row_elems]: a copy of one layer's rows of these tokens."""
        return self.blocks[:, layer].flatten(0, 1)[start:stop]

    def put_rows(self, layer: int, start: int, rows: Tensor) -> None:
        tokens = torch.arange(start, start + len(rows))
        block_size = self.blocks.shape[2]
        self.blocks[tokens // block_size, layer, tokens % block_size] = rows


class Engine:
    """A model with device memory of budget bytes."""

    def __init__(self, path: Path, budget: int, dtype: str = "float32", block_size: int = 64) -> None:
        self.directory: ModelDirectory = read_model_directory(path, dtype, block_size)
        self.model = LayeredModel.load(self.directory, CPU, threads=1)
        self.memory = TensorMemory(self.geometry, budget, CPU, "test")
        self.memory.pages().fill_(float("nan"))

    @property
    def geometry(self) -> BlockGeometry:
        return self.directory.manifest.geometry

    def stage(self, tokens: Sequence[int]) -> Staged:
        shape = (self.geometry.num_layers, self.geometry.block_size, self.memory.row_elems)
        blocks = torch.full((self.geometry.blocks_for(len(tokens)), *shape), float("nan"), dtype=self.memory.dtype)
        return Staged(list(tokens), blocks)

    def prefill(self, chunks: Sequence[tuple[Staged, int]], num_slots: int = 2) -> Tensor:
        """One layerwise forward over the next tokens of each sequence; the logits after all of them [T, vocab]."""
        sequences: list[SequenceSlice] = []
        for i, (staged, new) in enumerate(chunks):
            row = sum(s.cached + s.new for s in sequences)
            last = staged.computed + new == len(staged.tokens)
            sequences.append(SequenceSlice(f"r{i}", 0, row, staged.computed, new, last))
        rows = sum(s.cached + s.new for s in sequences)
        self.memory.note_use(num_slots * rows * self.geometry.row_bytes)
        slots = self.memory.layer_slots(Slots(0, rows, num_slots))
        kv = PackedAttention(sequences, [slots] * len(sequences))
        tokens = [token for staged, new in chunks for token in staged.tokens[staged.computed : staged.computed + new]]
        state = self.model.embed(torch.tensor(tokens), kv.positions())
        for layer in range(self.model.num_layers):
            slot = slots[layer % num_slots].fill_(float("nan"))
            for (staged, _), s in zip(chunks, sequences, strict=True):
                slot[s.row : s.row + s.cached] = staged.rows(layer, 0, s.cached)
            self.model.run_layer(layer, state, kv)
            for (staged, _), s in zip(chunks, sequences, strict=True):
                new_start = s.row + s.cached
                staged.put_rows(layer, s.cached, slot[new_start : new_start + s.new])
        for staged, new in chunks:
            staged.computed += new
        return self.model.logits(state, torch.arange(len(tokens)))

    def prefill_whole(self, tokens: Sequence[int]) -> tuple[Staged, int]:
        """Stage and prefill a prompt; the staged blocks and the first greedy token."""
        staged = self.stage(tokens)
        return staged, int(self.prefill([(staged, len(tokens))])[-1].argmax())

    def decode(self, batch: Sequence[tuple[Staged, int]], steps: int, seed: int = 0) -> list[list[int]]:
        """Greedy continuous batching over pages in random places: steps more tokens after each sequence's first one.

        Returns each sequence's output, the first token included.
        """
        size = self.geometry.block_size
        pages = self.memory.pages().fill_(float("nan"))
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed)).tolist()
        tables = [[order.pop() for _ in range(-(-(len(s.tokens) + steps) // size))] for s, _ in batch]
        for (staged, _), table in zip(batch, tables, strict=True):
            pages[table[: len(staged.blocks)]] = staged.blocks
        width = max(map(len, tables))
        page_table = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        lengths = torch.tensor([len(staged.tokens) for staged, _ in batch])
        outputs = [[first] for _, first in batch]
        for _ in range(steps):
            lengths = lengths + 1
            kv = PagedAttention(pages, page_table, lengths)
            state = self.model.embed(torch.tensor([output[-1] for output in outputs]), lengths - 1)
            for layer in range(self.model.num_layers):
                self.model.run_layer(layer, state, kv)
            tokens = self.model.logits(state, torch.arange(len(batch))).argmax(-1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs


def random_tokens(count: int, seed: int = 0, vocab: int = 512) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
