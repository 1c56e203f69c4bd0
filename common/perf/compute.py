"""Predicted time of a forward: the slower of computing and of reading memory, part by part.

With data-parallel attention a request's attention runs on one GPU; the linear layers of a batch are spread evenly. An
engine that stands for several GPUs gets, at best, that many times the throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.perf.hardware import Hardware
from common.perf.models import ModelProfile


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Seconds of one prefill forward, all layers. Engines of a group meet between the two parts of each layer."""

    attention_s: float
    linear_s: float

    @property
    def total_s(self) -> float:
        return self.attention_s + self.linear_s


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Times of a model on `gpus` GPUs of some hardware, in real seconds. Every time grows with each argument."""

    model: ModelProfile
    hardware: Hardware
    gpus: int = 1

    def prefill_attention_s(self, cached: int, new: int) -> float:
        """Attention of one request in all layers, on its one GPU."""
        return self.prefill_attention(cached, new)

    @property
    def prefill_attention(self) -> Callable[[float, float], float]:
        """prefill_attention_s, for whoever calls it often."""
        efficiency = self.hardware.efficiency
        kind = {
            "gqa": efficiency.prefill_gqa,
            "mla": efficiency.prefill_mla,
            "dsa": efficiency.prefill_dsa,
        }[self.model.attention.kind]
        return self._attention(kind)

    def prefill_linear_s(self, tokens: float) -> float:
        """Everything else in all layers, of a batch with `tokens` new tokens; 0 for none."""
        if tokens == 0:
            return 0.0
        return self._linear_s(tokens) + self.model.layers * self.hardware.efficiency.prefill_layer_s

    def prefill_s(self, batch: Iterable[tuple[int, int]]) -> PrefillTime:
        """One forward over (cached, new) pairs."""
        pairs = list(batch)
        attention = [self.prefill_attention_s(cached, new) for cached, new in pairs]
        return PrefillTime(self._spread(attention), self.prefill_linear_s(sum(new for _, new in pairs)))

    def decode_attention_s(self, context: float) -> float:
        """Attention of one sequence in all layers, for one token more: of `context` tokens with the new one."""
        return self._attention(self.hardware.efficiency.decode_attention)(context - 1, 1)

    @property
    def decode_attention(self) -> Callable[[float, float], float]:
        """(cached, new) -> seconds: decode_attention_s, for whoever calls it often."""
        return self._attention(self.hardware.efficiency.decode_attention)

    def decode_linear_s(self, sequences: int) -> float:
        """Everything else of a step that makes one token more for so many sequences."""
        return self._linear_s(sequences) + self.model.layers * self.hardware.efficiency.decode_layer_s

    def decode_step_s(self, contexts: Sequence[int]) -> float:
        """One token more for each sequence, of contexts tokens with the new one; 0 for none."""
        if not contexts:
            return 0.0
        attention = [self.decode_attention_s(context) for context in contexts]
        return self._spread(attention) + self.decode_linear_s(len(contexts))

    def tokens_per_s(self, cached: int, new: int) -> float:
        """Prompt tokens, hits included, of such turns that the engine prefills in a second."""
        turn_s = self.prefill_attention_s(cached, new) + self.model.linear_flops(new) / self._linear_flops_per_s
        return self.gpus * (cached + new) / turn_s

    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; a tenth of the memory is left to activations and the rest."""
        free = 0.9 * self.hardware.hbm_bytes - self.model.weight_bytes_a_gpu
        return int(self.gpus * max(free, 0.0) / self.model.resident_bytes_per_token)

    # -- parts --

    @property
    def _linear_flops_per_s(self) -> float:
        """Of one GPU."""
        if self.model.expert_params:
            return self.hardware.flops_8bit * self.hardware.efficiency.linear_experts
        return self.hardware.flops_16bit * self.hardware.efficiency.linear_dense

    @property
    def _hbm_rate(self) -> float:
        return self.hardware.hbm_rate * self.hardware.efficiency.hbm

    def _attention(self, efficiency: float) -> Callable[[float, float], float]:
        """(cached, new) -> seconds of all layers, the slower of computing and of reading; efficiency: of computing."""
        layers, hardware = self.model.layers, self.hardware
        costs = self.model.attention.costs
        attention_rate = hardware.flops_16bit * efficiency
        indexer_rate = hardware.flops_8bit * hardware.efficiency.indexer
        hbm_rate = self._hbm_rate

        def seconds(cached: float, new: float) -> float:
            if new == 0:
                return 0.0
            attention, indexer, read_bytes = costs(cached, new)
            compute = layers * (attention / attention_rate + indexer / indexer_rate)
            read = layers * read_bytes / hbm_rate
            return compute if compute > read else read

        return seconds

    def _linear_s(self, tokens: float) -> float:
        compute = self.model.linear_flops(tokens) / (self.gpus * self._linear_flops_per_s)
        return max(compute, self.model.weight_bytes_a_gpu / self._hbm_rate)

    def _spread(self, times: Sequence[float]) -> float:
        """Seconds of work that cannot be cut, on `gpus` GPUs, at best."""
        return max(max(times, default=0.0), sum(times) / self.gpus)
