"""A live cluster that stands for a real one: what is made smaller, by which stated factor.

An engine stands for `gpus` GPUs of a node and gets their share of its NICs and DRAM. KV moves in a smaller shape: real
bytes = byte_scale x moved bytes, and every rate and memory size is divided by byte_scale, so that times stay those of
the real cluster. Then all times are stretched by time_factor, because one host runs all processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.blocks.geometry import BlockGeometry, RowPart
from common.perf.compute import ComputeModel
from common.perf.hardware import Hardware
from common.perf.models import ModelProfile
from common.perf.thresholds import Thresholds, thresholds


@dataclass(frozen=True, slots=True)
class Scaling:
    """All sizes below are live bytes of one engine, all rates live bytes a second."""

    model: ModelProfile
    hardware: Hardware
    gpus: int = 1
    time_factor: float = 1.0
    moved_layers: int = 8
    row_bytes: int = 32

    def geometry(self, block_size: int) -> BlockGeometry:
        return BlockGeometry(self.moved_layers, block_size, (RowPart("kv", 1, self.row_bytes, "uint8"),))

    @property
    def compute(self) -> ComputeModel:
        """Real seconds: multiply by time_factor before sleeping."""
        return ComputeModel(self.model, self.hardware, self.gpus)

    @property
    def byte_scale(self) -> float:
        """Real bytes that one moved byte stands for."""
        return self.model.kv_bytes_per_token / (self.moved_layers * self.row_bytes)

    @property
    def snic_rate(self) -> float:
        return self.hardware.snic_rate * self._share / self.byte_scale / self.time_factor

    @property
    def cnic_rate(self) -> float:
        return self.hardware.cnic_rate * self.gpus / self.byte_scale / self.time_factor

    @property
    def prefill_memory(self) -> int:
        """Device memory of a prefill engine for the KV of its batch."""
        return int(self.model.prefill_kv_bytes * self.gpus / self.byte_scale)

    @property
    def layerwise_memory(self) -> int:
        """The same for an engine that holds few layers at a time: a layer here stands for several of the model's, and
        as many tokens have to fit."""
        return self.prefill_memory * self.model.layers // self.moved_layers

    @property
    def decode_memory(self) -> int:
        """Device memory of a decode engine for KV: what its weights leave."""
        return self.compute.kv_tokens() * self.moved_layers * self.row_bytes

    @property
    def buffer(self) -> int:
        """Staging buffer: the engine's share of the DRAM that a node has for it."""
        return int(self.model.dram_bytes * self._share / self.byte_scale)

    def thresholds(self, hit: int, miss: int) -> Thresholds:
        """alpha, beta and quota for a workload whose mean turn hits and misses so many tokens."""
        read_tokens_per_s = self.hardware.snic_rate * self._share / self.model.kv_bytes_per_token
        return thresholds(read_tokens_per_s, self.compute.tokens_per_s(hit, miss))

    def describe(self) -> dict[str, object]:
        """For a result's JSON: what was real, what was scaled, and how."""
        return {
            "model": self.model.name,
            "hardware": self.hardware.describe(),
            "gpus_per_engine": self.gpus,
            "time_factor": self.time_factor,
            "moved_bytes_per_token": self.moved_layers * self.row_bytes,
            "real_bytes_per_token": self.model.kv_bytes_per_token,
            "byte_scale": self.byte_scale,
            "snic_rate": self.snic_rate,
            "cnic_rate": self.cnic_rate,
            "prefill_memory_bytes": self.prefill_memory,
            "layerwise_memory_bytes": self.layerwise_memory,
            "decode_memory_bytes": self.decode_memory,
            "buffer_bytes": self.buffer,
            "statement": (
                f"one engine stands for {self.gpus} of a node's {self.hardware.gpus} GPUs; KV bytes, NIC rates and"
                f" memory are divided by {self.byte_scale:.1f}; times are multiplied by {self.time_factor:g} while"
                " running and divided by it in results"
            ),
        }

    @property
    def _share(self) -> float:
        return self.gpus / self.hardware.gpus
