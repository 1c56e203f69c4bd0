"""Which side reads a request's hit blocks (spec §7): one pure choice."""

from __future__ import annotations

from typing import Literal

from common.types import ReadPath

ReadSide = Literal["pe_only", "de_only", "round_robin", "shorter_queue", "split"]


def choose_read_path(
    side: ReadSide, queue_pe: int, queue_de: int, total_pe: int, total_de: int, turn: int
) -> ReadPath:
    """The reading side.

    queue_*: hit tokens waiting to be read on each side's node. total_*: hit tokens ever assigned to read there, which
    decides ties, so that idle nodes share the load instead of the PE taking all. turn: requests assigned before this.
    """
    if side == "pe_only":
        return ReadPath.PE
    if side == "de_only":
        return ReadPath.DE
    if side == "round_robin":
        return ReadPath.PE if turn % 2 == 0 else ReadPath.DE
    return ReadPath.PE if (queue_pe, total_pe) <= (queue_de, total_de) else ReadPath.DE
