"""Device memory for KV-cache ("HBM"): one byte budget in a segment that transports can reach (spec §4).

Used as ranges of layer slots (prefill) or as pages (decode). Here it is bytes only; a back end that computes on them
adds views.
"""

from __future__ import annotations

from common.blocks.geometry import BlockGeometry
from common.errors import ConfigError
from common.transport.memory import Memory


class DeviceMemory:
    """budget bytes of rows of one geometry.

    memory: the segment that transports register. peak_bytes: the most KV bytes that were ever in use at once.
    """

    def __init__(self, geometry: BlockGeometry, budget: int, name: str) -> None:
        """ConfigError if the budget holds no row."""
        if budget < geometry.row_bytes:
            raise ConfigError(f"device_memory of {budget} bytes holds no token: a row takes {geometry.row_bytes} bytes")
        self.geometry = geometry
        self.budget = budget
        self.peak_bytes = 0
        self.memory = Memory.create(name, budget)

    @property
    def num_pages(self) -> int:
        """Full Blocks that fit."""
        return self.budget // self.geometry.full_block_bytes

    def max_slot_rows(self, num_slots: int) -> int:
        """Rows of each of num_slots layer slots that fit."""
        return self.budget // (num_slots * self.geometry.row_bytes)

    def note_use(self, num_bytes: int) -> None:
        """Account for num_bytes of KV in use. RuntimeError if that is more than the budget."""
        if num_bytes > self.budget:
            raise RuntimeError(f"{num_bytes} bytes of KV do not fit device memory of {self.budget} bytes")
        self.peak_bytes = max(self.peak_bytes, num_bytes)

    def close(self) -> None:
        """Free the segment. Idempotent."""
        self.memory.close()
