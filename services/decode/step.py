"""One decode step in the compute thread: every running sequence advances by one token (continuous batching)."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from services.decode.sequence import Sequence
from services.engine.attention import PagedAttention
from services.engine.memory import DeviceMemory
from services.engine.model import LayeredModel
from services.engine.sampler import sample


def decode_step(model: LayeredModel, memory: DeviceMemory, pages: Tensor, batch: Sequences[Sequence]) -> list[int]:
    """The next token of each sequence. Writes the KV of its latest token into its page; reads nothing of the batch's
    mutable state but tokens, pages and num_computed, which nobody changes during a step."""
    latest = torch.tensor([sequence.tokens[sequence.num_computed] for sequence in batch])
    positions = torch.tensor([sequence.num_computed for sequence in batch])
    table = pad_sequence([torch.tensor(sequence.pages) for sequence in batch], batch_first=True)
    attention = PagedAttention(pages, table, positions + 1)
    state = model.embed(latest, positions)
    for layer in range(model.num_layers):
        model.run_layer(layer, state, attention)
    logits = model.logits(state, torch.arange(len(batch)))
    requests = [(sequence.request.sampling, sequence.num_generated) for sequence in batch]
    return sample(logits, requests, model.eos_token_ids)
