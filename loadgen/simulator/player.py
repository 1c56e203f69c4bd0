"""An agent in the middle of a trajectory, and the lengths of its turns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from common.workload.hits import hits
from common.workload.trajectories import Trajectory, Turn


class Lengths:
    """Of each turn of a trajectory: prompt, hits, tokens to generate; thinks: seconds before it, None without any."""

    __slots__ = ("generates", "hits", "prompts", "thinks")

    def __init__(self, trajectory: Trajectory) -> None:
        turns = trajectory.turns
        self.prompts = array("i", [turn.prompt for turn in turns])
        self.hits = array("i", hits(trajectory))
        self.generates = array("i", [turn.generate for turn in turns])
        self.thinks = [turn.think_s for turn in turns] if any(turn.think_s for turn in turns) else None


class Library:
    """Lengths that trajectories with the same turns share: of thousands, a set holds a few hundred."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Sequence[Turn], Lengths]] = {}

    def lengths(self, trajectory: Trajectory) -> Lengths:
        key = (id(trajectory.turns), trajectory.prefix)  # kept here, so that no others get this id
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (trajectory.turns, Lengths(trajectory))
        return known[1]


class Player:
    """due: when its first turn, or the turn in hand, was to be sent; made: tokens that attempts at this turn have made
    so far; first_at: the first of them."""

    __slots__ = ("attempt", "began", "due", "first_at", "index", "lengths", "made", "name")

    def __init__(self, name: str, lengths: Lengths, due: float) -> None:
        self.name = name
        self.lengths = lengths
        self.index = 0
        self.began = self.due = due
        self.attempt = 0
        self.made = 0
        self.first_at = -1.0
