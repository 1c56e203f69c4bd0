"""Which side reads a request's hit blocks (spec §7, §12): one pure choice."""

from __future__ import annotations

from typing import NamedTuple

from common.types import ReadPath
from services.scheduler.policy.state import Engine, ReadSide, Request


class Read(NamedTuple):
    """pe_tokens: of the hit tokens, those read on the prefill side. pe_blocks: staging buffer needed there."""

    path: ReadPath
    pe_tokens: int
    pe_blocks: int


ON_DE = Read(ReadPath.DE, 0, 0)


def choose_read(side: ReadSide, request: Request, pe: Engine, de: Engine, turn: int, block_size: int) -> Read:
    """How the request is read, with both engines chosen. turn: requests started before this one.

    On the prefill path the whole prompt is staged there. Where the room for it is lacking, the read goes to the decode
    side; a split read, with as much of it as there is room for, stays split.
    """
    fits = side == "pe_only" or request.num_blocks <= pe.free_blocks  # pe_only has reserved its room already
    if side == "split" and pe.node is not de.node:
        blocks, whole = (
            split_blocks(request.hit_tokens // block_size, pe, de, block_size),
            request.hit_tokens // block_size,
        )
        if blocks < whole or not fits:
            blocks = min(blocks, whole - 1, pe.free_blocks)
            return Read(ReadPath.SPLIT, blocks * block_size, blocks) if blocks > 0 else ON_DE
    elif not fits or not _prefers_pe(side, pe, de, turn):
        return ON_DE
    return Read(ReadPath.PE, request.hit_tokens, request.num_blocks)


def _prefers_pe(side: ReadSide, pe: Engine, de: Engine, turn: int) -> bool:
    match side:
        case "pe_only":
            return True
        case "de_only":
            return False
        case "round_robin":
            return turn % 2 == 0
        case "shorter_queue" | "split":  # a node is not split with itself
            return pe_queue_is_shorter(pe, de)


def pe_queue_is_shorter(pe: Engine, de: Engine) -> bool:
    """By the nodes' read queues. Between equals by what has ever been assigned to be read there, so that idle nodes
    take turns; and on one node by the same of its two engines."""
    return (pe.node.read_q, pe.node.read_total, pe.read_total) <= (de.node.read_q, de.node.read_total, de.read_total)


def split_blocks(hit_blocks: int, pe: Engine, de: Engine, block_size: int) -> int:
    """How many of the hit blocks the prefill side reads so that both sides finish together.

    The whole number next to x, in tokens: (q_pe + x) / r_pe = (q_de + h - x) / r_de, within [0, h]. If the rate of one
    node is not known, both count as equal.
    """
    hit = hit_blocks * block_size
    rate_pe, rate_de = pe.node.read_rate, de.node.read_rate
    if not rate_pe or not rate_de:
        rate_pe = rate_de = 1.0
    x = (rate_pe * (de.node.read_q + hit) - rate_de * pe.node.read_q) / (rate_pe + rate_de)
    return min(max(round(x / block_size), 0), hit_blocks)
