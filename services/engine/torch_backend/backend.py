"""The torch back end: everything that touches torch runs in one compute thread, the event loop only moves messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.config import Config, EngineConfig, PrefillConfig
from common.errors import ConfigError
from common.model import ModelDirectory, read_configured_directory
from common.perf.predictor import Identity, load_profile
from common.types import Sampled
from services.engine.backend import AttentionSeconds, DecodeSequence, PrefillSequence, Steps
from services.engine.torch_backend.attention import PackedAttention, PagedAttention
from services.engine.torch_backend.memory import TensorMemory
from services.engine.torch_backend.model import LayeredModel
from services.engine.torch_backend.sampler import sample

T = TypeVar("T")


class TorchBackend:
    """A Backend for a model directory."""

    def __init__(
        self,
        directory: ModelDirectory,
        layered: LayeredModel,
        memory: TensorMemory,
        executor: ThreadPoolExecutor,
        attention_s: AttentionSeconds | None,
    ) -> None:
        self.model = directory
        self.memory = memory
        self.eos_token_ids = layered.eos_token_ids
        self.attention_s = attention_s
        self._layered = layered
        self._executor = executor
        self._pages = memory.pages()

    @classmethod
    async def load(cls, config: Config, settings: EngineConfig, name: str) -> TorchBackend:
        """Load the configured model. ConfigError if it cannot be served."""
        try:
            device = torch.device(config.model.device)
        except RuntimeError as error:
            raise ConfigError(f"model.device {config.model.device!r}: {str(error).splitlines()[0]}") from None
        directory = await asyncio.to_thread(read_configured_directory, config.model)
        prefills = isinstance(settings, PrefillConfig)  # what is fitted is prefill on as many threads
        attention_s = _fitted_attention(config, settings, directory) if config.perf.predictor and prefills else None
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-compute")
        try:
            loop = asyncio.get_running_loop()
            layered = await loop.run_in_executor(executor, LayeredModel.load, directory, device, settings.threads)
            memory = TensorMemory(directory.manifest.geometry, settings.device_memory, device, f"{name}-hbm")
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        return cls(directory, layered, memory, executor, attention_s)

    async def prefill(self, batch: Sequence[PrefillSequence], steps: Steps) -> list[Sampled | None]:
        return await self._run(self._prefill, batch, steps)

    async def decode(self, batch: Sequence[DecodeSequence]) -> list[Sampled]:
        return await self._run(self._decode, batch)

    async def pull_pages(self, pages: Sequence[int]) -> None:
        if self.memory.mirrored:
            await self._run(self.memory.pull_pages, pages)

    async def push_pages(self, pages: Sequence[int]) -> None:
        if self.memory.mirrored:
            await self._run(self.memory.push_pages, pages)

    async def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        del self._pages
        self.memory.close()

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    # -- in the compute thread --

    def _prefill(self, batch: Sequence[PrefillSequence], steps: Steps) -> list[Sampled | None]:
        """One layerwise forward (paper §4.1)."""
        layered, memory = self._layered, self.memory
        views = {sequence.slots: memory.layer_slots(sequence.slots) for sequence in batch}
        attention = PackedAttention(
            [sequence.place for sequence in batch], [views[sequence.slots] for sequence in batch]
        )
        tokens = [token for sequence in batch for token in sequence.tokens]
        state = layered.embed(torch.tensor(tokens), attention.positions())
        for step in range(len(steps)):
            steps.wait(step)
            for layer in steps.layers(step):
                slots = [view[layer % len(view)] for view in views.values()]
                for slot in slots:
                    memory.pull(slot)
                layered.run_layer(layer, state, attention)
                for slot in slots:
                    memory.push(slot)
            steps.computed(step)
        ending = [index for index, sequence in enumerate(batch) if sequence.sampling is not None]
        first_tokens: list[Sampled | None] = [None] * len(batch)
        if ending:
            logits = layered.logits(state, attention.last_tokens()[ending])
            requests = [sequence.sampling for sequence in batch if sequence.sampling is not None]
            for index, token in zip(ending, sample(logits, requests, layered.eos_token_ids), strict=True):
                first_tokens[index] = token
        return first_tokens

    def _decode(self, batch: Sequence[DecodeSequence]) -> list[Sampled]:
        """Every running sequence advances by one token (continuous batching)."""
        layered = self._layered
        latest = torch.tensor([sequence.tokens[sequence.num_computed] for sequence in batch])
        positions = torch.tensor([sequence.num_computed for sequence in batch])
        table: Tensor = pad_sequence([torch.tensor(sequence.pages) for sequence in batch], batch_first=True)
        attention = PagedAttention(self._pages, table, positions + 1)
        state = layered.embed(latest, positions)
        for layer in range(layered.num_layers):
            layered.run_layer(layer, state, attention)
        logits = layered.logits(state, torch.arange(len(batch)))
        requests = [(sequence.request.sampling, sequence.num_generated) for sequence in batch]
        return sample(logits, requests, layered.eos_token_ids)


def _fitted_attention(config: Config, settings: EngineConfig, directory: ModelDirectory) -> AttentionSeconds:
    """From the file of `dualpath profile`. ConfigError if it is for something else."""
    manifest = directory.manifest
    identity = Identity(manifest.model_digest, config.model.device, manifest.geometry.parts[0].dtype, settings.threads)
    return load_profile(Path(config.perf.predictor), identity).attention.predictor.seconds
