"""Device memory for KV-cache ("HBM"): one byte budget, seen as layer slots (prefill) or as pages (decode) (spec §4).

On a CPU it is a shared segment: the engine's traffic manager registers it and writes rows into it, and the tensors
here are views of those same bytes. On any other device the segment stays in host memory and the tensors live on the
device; pull() and push() copy between the two. Registering device memory itself (GPUDirect) comes with the verbs
transport; pull and push are then empty there too.

Views are valid until close(); whoever computes on them stops before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from common.blocks.geometry import DTYPE_BYTES, BlockGeometry
from common.errors import ConfigError
from services.engine.backend import Slots
from services.engine.memory import DeviceMemory


class TensorMemory(DeviceMemory):
    """Device memory whose bytes are tensors; all parts of a row have one dtype."""

    def __init__(self, geometry: BlockGeometry, budget: int, device: torch.device, name: str) -> None:
        """ConfigError if the parts differ in dtype or the budget holds no row."""
        dtypes = {part.dtype for part in geometry.parts}
        if len(dtypes) > 1:
            raise ConfigError(f"device memory needs one dtype a row, not {', '.join(sorted(dtypes))}")
        (dtype,) = dtypes
        item_bytes = DTYPE_BYTES[dtype]
        super().__init__(geometry, budget - budget % item_bytes, name)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.item_bytes = item_bytes
        self.row_elems = geometry.row_bytes // item_bytes
        self._host = torch.frombuffer(self.memory.view, dtype=self.dtype)
        # the segment's own bytes on a CPU; a mirror of them elsewhere
        self._elems = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)

    def layer_slots(self, slots: Slots) -> list[Tensor]:
        """[rows, row_elems] each. The caller notes their use. RuntimeError if they do not fit."""
        size = slots.rows * self.row_elems
        first = slots.base // self.item_bytes
        if first + slots.count * size > len(self._elems):
            raise RuntimeError(f"{slots} do not fit device memory of {self.budget} bytes")
        return [self._view(first + slot * size, slots.rows, self.row_elems) for slot in range(slots.count)]

    def pages(self) -> Tensor:
        """[num_pages, num_layers, block_size, row_elems]: every page, each one Full Block. The caller notes its use."""
        return self._view(0, self.num_pages, self.geometry.num_layers, self.geometry.block_size, self.row_elems)

    def pull(self, view: Tensor) -> None:
        """Bring what transports wrote into the segment to a view of this memory. No copy on a CPU."""
        if self.mirrored:
            view.copy_(self._in_segment(view))

    def push(self, view: Tensor) -> None:
        """Bring a view of this memory to the segment, where transports read. No copy on a CPU."""
        if self.mirrored:
            self._in_segment(view).copy_(view)

    @property
    def mirrored(self) -> bool:
        """Tensors are not the segment's own bytes: pull and push have to be called."""
        return self._elems is not self._host

    def pull_pages(self, pages: Sequence[int]) -> None:
        """pull() of whole pages."""
        for page in pages:
            self.pull(self.pages()[page])

    def push_pages(self, pages: Sequence[int]) -> None:
        """push() of whole pages."""
        for page in pages:
            self.push(self.pages()[page])

    def close(self) -> None:
        """Free the segment and the mirror. Idempotent. Views of them must not be used any more."""
        self._host = self._elems = torch.empty(0, dtype=self.dtype)
        super().close()

    def _view(self, offset: int, *shape: int) -> Tensor:
        return self._elems[offset : offset + prod(shape)].view(shape)

    def _in_segment(self, view: Tensor) -> Tensor:
        return self._host.as_strided(view.size(), view.stride(), view.storage_offset())
