"""How much of each prompt the trajectory itself has stored: the hit length that a client can give (spec §4, §10).

Pure functions of lengths. They hold if hits lie inside a trajectory only, nothing is evicted and every turn before
this one is stored; the alternative is to let the scheduler look into the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import hit_block_limit
from common.workload.trajectories import Trajectory, Turn

BLOCK_TOKENS = 64


def hit_tokens(turn: Turn, stored: int, block: int = BLOCK_TOKENS) -> int:
    """Prompt tokens of turn that hit: whole blocks of what it shares with the stored history, never the last token.

    stored: leading tokens of the history whose KV has been computed: after a turn all but the token generated last,
    before the first turn the prefix.
    """
    return block * min(min(turn.context, stored) // block, hit_block_limit(turn.prompt, block))


def hits(trajectory: Trajectory, block: int = BLOCK_TOKENS) -> list[int]:
    """The hit length of each turn, in order."""
    lengths: list[int] = []
    stored = trajectory.prefix
    for turn in trajectory.turns:
        lengths.append(hit_tokens(turn, stored, block))
        stored = turn.total - 1
    return lengths


@dataclass(frozen=True, slots=True)
class Pooled:
    """Means over all turns of all trajectories, in tokens; each turn weighs the same."""

    turns: int
    hit: float
    miss: float
    generate: float


def pooled(trajectories: Sequence[Trajectory], block: int = BLOCK_TOKENS) -> Pooled:
    """What an average turn reads, computes and generates. ValueError if there is no turn."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        raise ValueError("no turn to take a mean of")
    hit = sum(sum(hits(trajectory, block)) for trajectory in trajectories)
    prompt = sum(turn.prompt for turn in turns)
    generate = sum(turn.generate for turn in turns)
    count = len(turns)
    return Pooled(count, hit / count, (prompt - hit) / count, generate / count)
