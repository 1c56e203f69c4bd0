"""Measuring a model's forwards, in a process of its own (`dualpath profile` runs it and fits what it finds).

    python -m services.engine.torch_backend.profile_run CONFIG_JSON MAX_CONTEXT REPEATS

Prints `DONE/TOTAL` lines and then one JSON object: {"max_context", "threads", "prefill": [{cached, new, attention_s,
linear_s}], "decode": [{context, sequences, step_s}]}. Each time is the least of the repeats, which go round all points:
whatever else the machine does only ever adds to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from common.config import Config, EngineConfig, read_dumped_config
from common.errors import ConfigError
from common.messages import SequenceSlice
from common.model import ModelDirectory, read_configured_directory
from services.engine.backend import Slots
from services.engine.torch_backend.attention import KVAccess, PackedAttention, PagedAttention
from services.engine.torch_backend.memory import TensorMemory
from services.engine.torch_backend.model import LayeredModel

T = TypeVar("T")
LEAST_NEW, LEAST_CACHED = 16, 256


def prefill_grid(max_context: int, max_new: int) -> list[tuple[int, int]]:
    """(cached, new), each in powers of two, that fit max_context together."""
    news = _doubling(min(LEAST_NEW, max_new), max_new)
    cached = [0, *_doubling(LEAST_CACHED, max_context)]
    return [(c, n) for c in cached for n in news if c + n <= max_context]


def decode_grid(max_context: int, max_running: int) -> list[tuple[int, int]]:
    """(context, sequences)."""
    return [(c, n) for c in sorted({min(LEAST_CACHED, max_context), max_context}) for n in sorted({1, max_running})]


@dataclass(slots=True)
class _Timed:
    """A KVAccess that adds up how long another one takes."""

    kv: KVAccess
    clock: Callable[[], float]
    seconds: float = 0.0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        started = self.clock()
        output = self.kv.attend(layer, query, key, value, scaling)
        self.seconds += self.clock() - started
        return output


class Bench:
    """One model on its device. A point is measured as the engines would run it, on KV of zeros."""

    def __init__(self, config: Config) -> None:
        """ConfigError if the model cannot be served."""
        try:
            self._device = torch.device(config.model.device)
        except RuntimeError as error:
            raise ConfigError(f"model.device {config.model.device!r}: {str(error).splitlines()[0]}") from None
        self.directory: ModelDirectory = read_configured_directory(config.model)
        self._layered = LayeredModel.load(self.directory, self._device, config.prefill.threads)
        self._slots = self._memory(config.prefill, "profile-prefill")
        self._paged = self._memory(config.decode, "profile-decode")

    def _memory(self, settings: EngineConfig, name: str) -> TensorMemory:
        return TensorMemory(self.directory.manifest.geometry, settings.device_memory, self._device, name)

    def max_context(self, wanted: int) -> int:
        """As much of `wanted` as the model and both memories hold."""
        rows = self._slots.max_slot_rows(2)
        pages = self._paged.num_pages * self.directory.manifest.geometry.block_size
        return min(wanted, self.directory.max_context_tokens, rows, pages)

    def prefill(self, cached: int, new: int) -> tuple[float, float]:
        """Seconds of attention, and of the rest, of one request's forward."""
        slots = self._slots.layer_slots(Slots(0, cached + new, 2))
        place = SequenceSlice("profile", 0, 0, cached, new, True)
        tokens = torch.zeros(new, dtype=torch.int64)
        started = self._clock()
        packed = PackedAttention([place], [slots])
        kv = _Timed(packed, self._clock, self._clock() - started)  # its masks are attention, too
        state = self._layered.embed(tokens, packed.positions())
        for layer in range(self._layered.num_layers):
            self._layered.run_layer(layer, state, kv)
        self._layered.logits(state, packed.last_tokens())
        return kv.seconds, self._clock() - started - kv.seconds

    def decode(self, context: int, sequences: int) -> float:
        """Seconds of one step."""
        geometry = self.directory.manifest.geometry
        blocks = geometry.blocks_for(context)
        # sequences share pages only if there are not enough for all
        table = (torch.arange(sequences * blocks) % self._paged.num_pages).view(sequences, blocks)
        positions = torch.full((sequences,), context - 1)
        tokens = torch.zeros(sequences, dtype=torch.int64)
        started = self._clock()
        kv = PagedAttention(self._paged.pages(), table, positions + 1)
        state = self._layered.embed(tokens, positions)
        for layer in range(self._layered.num_layers):
            self._layered.run_layer(layer, state, kv)
        self._layered.logits(state, torch.arange(sequences))
        return self._clock() - started

    def close(self) -> None:
        self._slots.close()
        self._paged.close()

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def measure(config: Config, max_context: int, repeats: int, on_done: Callable[[int, int], None]) -> dict[str, object]:
    """The JSON object of the module's head. ConfigError if the model cannot be served."""
    bench = Bench(config)
    try:
        context = bench.max_context(max_context)
        prefills = prefill_grid(context, config.prefill.max_batch_tokens)
        decodes = decode_grid(context, config.decode.max_running)
        total = repeats * (len(prefills) + len(decodes))
        done = 0

        def counted(result: T) -> T:
            nonlocal done
            done += 1
            on_done(done, total)
            return result

        bench.prefill(*prefills[-1])  # the first forward loads kernels and takes memory
        rounds = [
            (
                [counted(bench.prefill(*point)) for point in prefills],
                [counted(bench.decode(*point)) for point in decodes],
            )
            for _ in range(repeats)
        ]
    finally:
        bench.close()
    return {
        "max_context": context,
        "threads": torch.get_num_threads(),
        "prefill": [
            {
                "cached": cached,
                "new": new,
                "attention_s": min(prefilled[index][0] for prefilled, _ in rounds),
                "linear_s": min(prefilled[index][1] for prefilled, _ in rounds),
            }
            for index, (cached, new) in enumerate(prefills)
        ],
        "decode": [
            {"context": length, "sequences": count, "step_s": min(decoded[index] for _, decoded in rounds)}
            for index, (length, count) in enumerate(decodes)
        ],
    }


def _doubling(first: int, last: int) -> list[int]:
    """first, twice as many, ... up to last."""
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths


def main(config: str, max_context: str, repeats: str) -> int:
    try:
        result = measure(
            read_dumped_config(config),
            int(max_context),
            int(repeats),
            lambda done, total: print(f"{done}/{total}", flush=True),
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
