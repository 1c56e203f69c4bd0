"""The profiled back end: no tensors. A forward takes the time that common.perf predicts for the named hardware, while
KV bytes really move around it (design: Compute). Tokens are made up, the same for every run.

Times are kept against a schedule, not slept one after the other: what a wait oversleeps is made up for by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.clock import monotonic
from common.config import Config, EngineConfig
from common.model import configured_scaling, read_configured_model
from common.types import Sampled
from services.engine.backend import DecodeSequence, PrefillSequence, Steps
from services.engine.lockstep import Lockstep
from services.engine.memory import DeviceMemory

#: The schedule goes on from the end of the last piece of work if the next one is there within so many seconds of it:
#: that much is the lateness of this process, not idle time of the engine it stands for.
GRACE_S = 0.005


class ProfiledBackend:
    """A Backend for a model of common.perf."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, config: Config, settings: EngineConfig, name: str) -> None:
        """ConfigError if the model or the hardware is unknown."""
        self.model = read_configured_model(config)
        self.memory = DeviceMemory(self.model.manifest.geometry, settings.device_memory, f"{name}-hbm")
        scaling = configured_scaling(config)
        self._compute = scaling.compute
        self._time_factor = scaling.time_factor
        self._busy_until = 0.0
        self._lockstep: Lockstep | None = None

    def join(self, lockstep: Lockstep) -> None:
        """From now on prefill forwards take the time of the slowest of the group."""
        self._lockstep = lockstep

    def attention_s(self, cached: int, new: int) -> float:
        return self._compute.prefill_attention_s(cached, new) / self._compute.gpus

    def linear_s(self, tokens: float) -> float:
        """All but attention, of a forward with so many new tokens."""
        return self._compute.prefill_linear_s(tokens)

    async def prefill(self, batch: Sequence[PrefillSequence], steps: Steps) -> list[Sampled | None]:
        time = self._compute.prefill_s([(sequence.place.cached, sequence.place.new) for sequence in batch])
        seconds = time.total_s
        if self._lockstep is not None:
            seconds = await self._lockstep.meet(time.attention_s, sum(sequence.place.new for sequence in batch))
        await self._pass_steps(steps, seconds * self._time_factor)
        return [
            None if sequence.sampling is None else self._token(sequence.place.cached + sequence.place.new)
            for sequence in batch
        ]

    async def _pass_steps(self, steps: Steps, total_s: float) -> None:
        """Each step takes its layers' share of the time, from when it is loaded and the one before it is done; but the
        first one from now on, however long ago it was loaded."""
        begun = monotonic()
        per_layer = total_s / steps.num_layers
        for step in range(len(steps)):
            since = max(begun, await steps.opened(step))
            await self._work(since, len(steps.layers(step)) * per_layer)
            steps.computed(step)

    async def decode(self, batch: Sequence[DecodeSequence]) -> list[Sampled]:
        seconds = self._compute.decode_step_s([sequence.num_computed + 1 for sequence in batch])
        await self._work(monotonic(), seconds * self._time_factor)
        return [self._token(sequence.num_computed + 1) for sequence in batch]

    async def pull_pages(self, pages: Sequence[int]) -> None:
        pass

    async def push_pages(self, pages: Sequence[int]) -> None:
        pass

    async def close(self) -> None:
        self.memory.close()

    async def _work(self, since: float, seconds: float) -> None:
        """Be busy for so long, from `since` on or from the end of the work before."""
        idle = since > self._busy_until + GRACE_S
        self._busy_until = (since if idle else self._busy_until) + seconds
        await asyncio.sleep(max(0.0, self._busy_until - monotonic()))

    def _token(self, length: int) -> Sampled:
        """The token after so many others."""
        return Sampled((length * 7919 + 13) % self.model.vocab_size)
