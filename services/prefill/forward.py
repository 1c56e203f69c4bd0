"""One layerwise forward in the compute thread (paper §4.1).

The event loop opens a step's gate when the traffic manager has loaded its layers; the compute thread passes the gates
in order and reports each step back, so that sends and loads go on around the layers in hand.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from common.messages import BeginForward, LayersComputed
from common.types import RequestKey, Sampling
from services.engine.attention import PackedAttention
from services.engine.memory import DeviceMemory
from services.engine.model import LayeredModel
from services.engine.sampler import sample


@dataclass(slots=True)
class ForwardRun:
    """A forward in hand. tokens: of all sequences, packed. sampling: per sequence, its parameters and output index if
    the sequence ends its prefill here, else None."""

    plan: BeginForward
    tokens: list[int]
    sampling: list[tuple[Sampling, int] | None]
    num_layers: int
    gates: list[threading.Event] = field(init=False)
    failed: set[RequestKey] = field(default_factory=set)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gates = [threading.Event() for _ in range(0, self.num_layers, self.plan.layers_per_step)]

    def loaded(self, step: int, failed: list[RequestKey]) -> None:
        """The slots of this step are ready."""
        self.failed.update(failed)
        self.gates[step].set()

    def abandon(self) -> None:
        """Let the compute thread run through: nobody wants the result any more."""
        for gate in self.gates:
            gate.set()

    def compute(
        self, model: LayeredModel, memory: DeviceMemory, computed: Callable[[LayersComputed], None], wait_s: float
    ) -> list[int | None]:
        """Run all layers; returns the sampled first token of each sequence that ends its prefill here.

        computed is called from this thread after each step. TimeoutError if a step does not come within wait_s.
        """
        plan = self.plan
        slots = [memory.layer_slot(slot, plan.rows, plan.num_slots) for slot in range(plan.num_slots)]
        attention = PackedAttention(plan.sequences, slots)
        state = model.embed(torch.tensor(self.tokens), attention.positions())
        for step, gate in enumerate(self.gates):
            if not gate.wait(wait_s):
                raise TimeoutError(f"step {step} was not loaded within {wait_s:g} s")
            first = step * plan.layers_per_step
            for layer in range(first, min(first + plan.layers_per_step, self.num_layers)):
                slot = slots[layer % plan.num_slots]
                memory.pull(slot)
                model.run_layer(layer, state, attention)
                memory.push(slot)
            computed(LayersComputed(plan.forward, step))
        ending = [index for index, sampling in enumerate(self.sampling) if sampling is not None]
        first_tokens: list[int | None] = [None] * len(self.sampling)
        if ending:
            logits = model.logits(state, attention.last_tokens()[ending])
            requests = [sampling for sampling in self.sampling if sampling is not None]
            for index, token in zip(ending, sample(logits, requests, model.eos_token_ids), strict=True):
                first_tokens[index] = token
        return first_tokens
