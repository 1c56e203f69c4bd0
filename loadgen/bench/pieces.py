"""What a side moves: pieces of one size, scattered in a source region, into other places of a target region. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The paper's Layer Block and Full Block of DeepSeek V3.2, and one in between, bytes.
LAYER_BLOCK, FULL_BLOCK = 41 * 1024, 61 * 64 * 656
SIZES = {"41 KiB": LAYER_BLOCK, "1 MiB": 1 << 20, "2.4 MiB": FULL_BLOCK}


@dataclass(frozen=True, slots=True)
class Layout:
    """count pieces of size bytes. Both regions have region_bytes; the one fills in the same way on every side."""

    size: int
    count: int

    @property
    def region_bytes(self) -> int:
        return self.size * self.count

    def runs(self) -> NDArray[np.int64]:
        """int64 [count, 3] of source, target, length: no piece has its neighbour's neighbour, so none can be joined."""
        chance = np.random.default_rng(self.size)
        source, target = chance.permutation(self.count), chance.permutation(self.count)
        return np.stack([source * self.size, target * self.size, np.full(self.count, self.size)], axis=1)

    def content(self) -> NDArray[np.uint8]:
        """The source region's bytes."""
        return np.random.default_rng(self.count).integers(0, 256, self.region_bytes, dtype=np.uint8)

    def expected(self) -> NDArray[np.uint8]:
        """The target region's bytes, once every piece has arrived."""
        sent, received = self.content(), np.empty(self.region_bytes, np.uint8)
        for source, target, length in self.runs().tolist():
            received[target : target + length] = sent[source : source + length]
        return received


def layout(size: int, most_bytes: int) -> Layout:
    """As many pieces as fit in most_bytes, two at least."""
    return Layout(size, max(2, most_bytes // size))
