"""What computes: the interface between the engine roles and their back ends (design: Compute).

`torch` (services.engine.torch_backend) runs a real model, `profiled` (services.engine.profiled) takes the time that
common.perf predicts and moves no tensor. Both answer on the event loop and never block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.clock import monotonic
from common.messages import SequenceSlice
from common.model import ModelInfo
from common.types import Request, Sampled, Sampling
from services.engine.memory import DeviceMemory


@dataclass(frozen=True, slots=True)
class Slots:
    """Layer slots of device memory: layer l is in slot l % count; slot s starts at byte base + s * rows * row_bytes."""

    base: int
    rows: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """A sequence of a forward batch: its rows of every slot, its new tokens and, if its prefill ends here, its sampling
    parameters and output index."""

    place: SequenceSlice
    slots: Slots
    tokens: Sequence[int]
    sampling: tuple[Sampling, int] | None


class Steps:
    """The steps of a forward, layers_per_step layers each. The event loop opens each as its layers are loaded; whoever
    computes passes them in order, on any thread, and reports each back with computed(), of which on_computed learns on
    the event loop."""

    def __init__(
        self, num_layers: int, layers_per_step: int, on_computed: Callable[[int], None], wait_s: float
    ) -> None:
        self.num_layers = num_layers
        self.layers_per_step = layers_per_step
        self._on_computed = on_computed
        self._wait_s = wait_s
        self._loop = asyncio.get_running_loop()
        count = -(-num_layers // layers_per_step)
        self._gates = [threading.Event() for _ in range(count)]
        self._opened = [asyncio.Event() for _ in range(count)]
        self._opened_at = [0.0] * count

    def __len__(self) -> int:
        return len(self._gates)

    def layers(self, step: int) -> range:
        first = step * self.layers_per_step
        return range(first, min(first + self.layers_per_step, self.num_layers))

    def open(self, step: int) -> None:
        """Its layers are loaded. On the event loop."""
        self._opened_at[step] = monotonic()
        self._gates[step].set()
        self._opened[step].set()

    def computed(self, step: int) -> None:
        """Its layers are computed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody wants to know
            self._loop.call_soon_threadsafe(self._on_computed, step)

    def abandon(self) -> None:
        """Let whoever computes run through: nobody wants the result any more."""
        for step in range(len(self)):
            self.open(step)

    def wait(self, step: int) -> None:
        """Block this thread until the step is open. TimeoutError if it does not become so."""
        if not self._gates[step].wait(self._wait_s):
            raise TimeoutError(self._late(step))

    async def opened(self, step: int) -> float:
        """Wait until the step is open; since when it is. TimeoutError if it does not become so."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._opened[step].wait()
        except TimeoutError:
            raise TimeoutError(self._late(step)) from None
        return self._opened_at[step]

    def _late(self, step: int) -> str:
        return f"step {step} was not loaded within {self._wait_s:g} s"


AttentionSeconds = Callable[[int, int], float]
"""(cached, new) tokens -> seconds of the hardware that is served for."""


class DecodeSequence(Protocol):
    """What a decode step needs to know of a running sequence. Nobody changes it during a step."""

    tokens: list[int]
    num_computed: int
    pages: list[int]

    @property
    def request(self) -> Request: ...

    @property
    def num_generated(self) -> int: ...


class Backend(Protocol):
    """One device. At most one prefill or decode call runs at a time.

    memory: made by the back end, closed by close(). eos_token_ids: tokens that end a sequence.
    """

    @property
    def model(self) -> ModelInfo: ...
    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def attention_s(self) -> AttentionSeconds | None:
        """Predicted attention of one request, all layers; None where nothing is known of it."""

    async def prefill(self, batch: Sequence[PrefillSequence], steps: Steps) -> list[Sampled | None]:
        """Run all layers; the first token of each sequence that ends its prefill here. TimeoutError if a step does not
        open."""

    async def decode(self, batch: Sequence[DecodeSequence]) -> list[Sampled]:
        """The next token of each sequence; writes the KV of its latest token into its page."""

    async def pull_pages(self, pages: Sequence[int]) -> None:
        """The pages were written by a transport: let decode() see it."""

    async def push_pages(self, pages: Sequence[int]) -> None:
        """Let transports see what decode() has written into the pages."""

    async def close(self) -> None:
        """End its thread and free its memory. Nothing may be running, or be waited for, any more."""
