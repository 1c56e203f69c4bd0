"""Trajectories: one agent run as a sequence of turns (spec §2), in lengths and times only.

The history of a trajectory is every token of it so far: the last prompt and what was generated from it. The prompt of
a turn is the first `context` tokens of the history and `append` new ones; then exactly `generate` tokens are asked
for. Normally context is the whole history; a compaction or a branch falls back to a prefix of it.

A trajectory is immutable; every step that sizes, cuts or cuts out (scaling, windows, gaps, extend) returns a new one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent. Lengths in tokens; think_s: seconds between the previous turn's end and this one."""

    context: int
    append: int
    generate: int
    think_s: float = 0.0

    @property
    def prompt(self) -> int:
        """Length of the prompt."""
        return self.context + self.append

    @property
    def total(self) -> int:
        """Length of the history after this turn; what must fit the model's context."""
        return self.prompt + self.generate


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one agent run, in order. ValueError for a turn that is impossible (length below 1, context past
    the history).

    prefix: tokens of history before the first turn. Whoever plays a trajectory with one sees to it beforehand that
    their KV is stored: they were computed by turns that are not played.
    """

    name: str
    turns: tuple[Turn, ...]
    prefix: int = 0

    def __post_init__(self) -> None:
        history = self.prefix
        for index, turn in enumerate(self.turns):
            if turn.append < 1 or turn.generate < 1 or not 0 <= turn.context <= history:
                raise ValueError(f"{self.name}: turn {index} ({turn}) does not follow a history of {history} tokens")
            history = turn.total

    @property
    def peak(self) -> int:
        """The longest context in tokens, generation included."""
        return max((turn.total for turn in self.turns), default=0)
