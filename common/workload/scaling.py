"""How sessions are fitted to a model's context. Nothing is scaled silently: Workload.describe() says what was done.

The rule, in this order:
1. The first max_sessions sessions, and of each the first max_turns turns, are taken.
2. Sweeps (spec §10): every append is multiplied by append_factor and every generation by generate_factor, to the
   nearest whole number. With scale K every length is divided by K; with max_context M each session is divided by its
   own K, the first whole number from ceil(longest / M) on with which its longest context, generation included, is at
   most M. A divided length is rounded down. A length is at least 1. A context keeps its share of the history, so a
   whole history stays whole and a fall-back stays where it was. Times are never scaled. Without these options lengths
   are native.
3. A session is cut before the first turn that exceeds the model's limit, or max_length (the paper's MAL, max agent
   length) if that is less; that turn and all after it are counted as cut. A session whose first turn does not fit is
   dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError
from common.workload.trajectories import Trajectory, Turn

RULE = (
    "native lengths, cut at the model's limit or max_length; only append_factor and generate_factor multiply, to the "
    "nearest whole number; only scale or max_context divide: lengths // K; all at least 1, a context keeps its share "
    "of the history"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a set is used, and how long (see the rule). None and 1.0: all of it, native."""

    max_sessions: int | None = None
    max_turns: int | None = None
    max_context: int | None = None
    scale: int | None = None
    append_factor: float = 1.0
    generate_factor: float = 1.0
    max_length: int | None = None


#: What suits a 135M-parameter model on two CPU cores: about 40 s of work.
DEMO = Selection(max_sessions=4, max_turns=5, max_context=900)


@dataclass(frozen=True, slots=True)
class Workload:
    """Fitted trajectories and what was done to them. factors: K of each, in order."""

    trajectories: tuple[Trajectory, ...]
    factors: tuple[int, ...]
    selection: Selection
    limit: int | None
    cut_sessions: int
    cut_turns: int
    dropped_sessions: int

    @property
    def num_turns(self) -> int:
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    def describe(self) -> dict[str, Any]:
        """For the result: the rule, the options, the factor of each session, the counts and the planned lengths."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]
        return {
            "rule": RULE,
            "model_limit": self.limit,
            "max_sessions": self.selection.max_sessions,
            "max_turns": self.selection.max_turns,
            "max_context": self.selection.max_context,
            "scale": self.selection.scale,
            "append_factor": self.selection.append_factor,
            "generate_factor": self.selection.generate_factor,
            "max_length": self.selection.max_length,
            "factors": {t.name: k for t, k in zip(self.trajectories, self.factors, strict=True)},
            "cut_sessions": self.cut_sessions,
            "cut_turns": self.cut_turns,
            "dropped_sessions": self.dropped_sessions,
            "sessions": len(self.trajectories),
            "turns": len(turns),
            "prompt_tokens": sum(turn.prompt for turn in turns),
            "append_tokens": sum(turn.append for turn in turns),
            "generate_tokens": sum(turn.generate for turn in turns),
            "longest_context": max(trajectory.peak for trajectory in self.trajectories),
        }


def fit(trajectories: Sequence[Trajectory], selection: Selection, limit: int | None) -> Workload:
    """Apply the rule. limit: the model's context in tokens, None if unknown (then nothing is cut).

    ConfigError if the options contradict each other or the limit, or if no session is left.
    """
    if selection.scale is not None and selection.max_context is not None:
        raise ConfigError("--scale and --max-context both divide the lengths: give one of them")
    if selection.max_context is not None and limit is not None and selection.max_context > limit:
        raise ConfigError(f"--max-context {selection.max_context} exceeds the model's limit of {limit} tokens")
    ceiling = min((cap for cap in (limit, selection.max_length) if cap is not None), default=None)
    kept: list[Trajectory] = []
    factors: list[int] = []
    shortest: int | None = None
    cut_sessions = cut_turns = dropped = 0
    for trajectory in trajectories[: selection.max_sessions]:
        taken = replace(trajectory, turns=trajectory.turns[: selection.max_turns])
        taken = stretched(taken, selection.append_factor, selection.generate_factor)
        factor = selection.scale or 1
        if selection.max_context is not None:
            factor = scale_to(taken, selection.max_context)
        sized = scaled(taken, factor)
        fitted = cut(sized, ceiling)
        if not fitted.turns:
            dropped += 1
            shortest = min(shortest or sized.turns[0].total, sized.turns[0].total)
            continue
        lost = len(sized.turns) - len(fitted.turns)
        cut_turns += lost
        cut_sessions += lost > 0
        kept.append(fitted)
        factors.append(factor)
    if not kept:
        raise ConfigError(
            f"none of the {dropped} sessions fits the limit of {ceiling} tokens (the shortest first turn has "
            f"{shortest}): add --max-context {ceiling}, which divides each session's lengths until it fits"
        )
    return Workload(tuple(kept), tuple(factors), selection, limit, cut_sessions, cut_turns, dropped)


def stretched(trajectory: Trajectory, append_factor: float, generate_factor: float) -> Trajectory:
    """The trajectory with appends and generations multiplied, each by its own factor (sweeps; step 2 of the rule).

    ValueError for a factor that is not above 0, or a trajectory with a prefix (stretch first, then take windows).
    """
    if not (append_factor > 0 and generate_factor > 0):
        raise ValueError(f"factors {append_factor} and {generate_factor} must be above 0")
    if append_factor == generate_factor == 1:
        return trajectory
    return _resized(trajectory, lambda n: round(n * append_factor), lambda n: round(n * generate_factor))


def scaled(trajectory: Trajectory, factor: int) -> Trajectory:
    """The trajectory with every length divided by factor (step 2 of the rule). ValueError as for stretched."""
    if factor == 1:
        return trajectory
    return _resized(trajectory, lambda n: n // factor, lambda n: n // factor)


def _resized(trajectory: Trajectory, append: Callable[[int], int], generate: Callable[[int], int]) -> Trajectory:
    if trajectory.prefix:
        raise ValueError(f"{trajectory.name} has a prefix of {trajectory.prefix} tokens: size it, then take its window")
    turns: list[Turn] = []
    native = history = 0
    for turn in trajectory.turns:
        context = round(history * turn.context / native) if native else 0
        sized = replace(
            turn, context=context, append=max(1, append(turn.append)), generate=max(1, generate(turn.generate))
        )
        turns.append(sized)
        native, history = turn.total, sized.total
    return replace(trajectory, turns=tuple(turns))


def scale_to(trajectory: Trajectory, max_context: int) -> int:
    """The factor with which the longest context is at most max_context (step 2 of the rule).

    ConfigError if there is none: lengths do not fall below 1.
    """
    least = scaled(trajectory, trajectory.peak + 1).peak
    if least > max_context:
        raise ConfigError(
            f"session {trajectory.name} has {len(trajectory.turns)} turns, which need a context of at least {least} "
            f"tokens: raise --max-context from {max_context} or lower --max-turns"
        )
    factor = max(1, -(-trajectory.peak // max_context))
    while scaled(trajectory, factor).peak > max_context:
        factor += 1
    return factor


def cut(trajectory: Trajectory, limit: int | None) -> Trajectory:
    """The trajectory up to the first turn that exceeds limit (step 3 of the rule); it may be left without turns."""
    kept = next((i for i, turn in enumerate(trajectory.turns) if limit is not None and turn.total > limit), None)
    return replace(trajectory, turns=trajectory.turns[:kept])
