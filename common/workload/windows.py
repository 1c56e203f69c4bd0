"""A few turns at native context: parts of long trajectories that can be played live.

A window is turns [start, start + n) of a trajectory. Its first turn finds the whole earlier context in storage, so
whoever plays it stores the window's prefix first: the first hits(window)[0] tokens of its stream (IdText.tokens). The
turns after the first hit what the window itself has stored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from common.workload.hits import hits, pooled
from common.workload.trajectories import Trajectory

#: Draws of which the most typical one is taken, or fewer with more windows than this in all: many are typical anyway.
_DRAWS = 64
_DRAWN = 20_480
_HALVINGS = 20


def window(trajectory: Trajectory, start: int, turns: int) -> Trajectory:
    """Turns [start, start + turns), with the context of the first one as prefix. ValueError if they do not exist.

    Its name is its own, so that two windows of one trajectory share no text.
    """
    if not 0 <= start < start + turns <= len(trajectory.turns):
        raise ValueError(f"{trajectory.name} has no turns {start} to {start + turns} of {len(trajectory.turns)}")
    kept = trajectory.turns[start : start + turns]
    return replace(trajectory, name=f"{trajectory.name}@{start}", turns=kept, prefix=kept[0].context)


def windows(trajectories: Sequence[Trajectory], count: int, turns: int, seed: int) -> list[Trajectory]:
    """count different windows of that many turns, whose mean hit length is that of all turns of all trajectories.

    Every window of the set is as likely as any other, so agents are at all phases. The windows sorted by hit length
    are dealt into `count` equal ranges, one is drawn from each, and all draws are shifted together within their ranges
    until the mean fits. Of several such draws the one whose misses and generations are closest to the set's is taken.
    In random order; the same for the same arguments. ValueError if there are fewer than count windows.
    """
    candidates = _candidates(trajectories, turns)
    if not 0 < count <= len(candidates):
        raise ValueError(f"{len(candidates)} windows of {turns} turns in {len(trajectories)} trajectories, not {count}")
    typical = pooled(trajectories)
    rng = random.Random(f"windows/{seed}")
    draws = [_draw(candidates, count, typical.hit * turns, rng) for _ in range(max(2, min(_DRAWS, _DRAWN // count)))]

    def distance(draw: list[_Candidate]) -> float:
        miss = sum(candidate.miss for candidate in draw) / (count * turns)
        generate = sum(candidate.generate for candidate in draw) / (count * turns)
        return max(abs(miss / typical.miss - 1), abs(generate / typical.generate - 1))

    chosen = min(draws, key=distance)
    rng.shuffle(chosen)
    return [window(trajectories[candidate.trajectory], candidate.start, turns) for candidate in chosen]


def beginnings(trajectories: Sequence[Trajectory], count: int, turns: int, seed: int) -> list[Trajectory]:
    """The first turns of `count` of the trajectories, drawn and ordered at random: how a job begins whose agents all
    start at once. ValueError if there are fewer that have so many turns."""
    long_enough = [trajectory for trajectory in trajectories if len(trajectory.turns) >= turns]
    if not 0 < count <= len(long_enough):
        raise ValueError(f"{len(long_enough)} trajectories have {turns} turns, not {count}")
    return [
        window(trajectory, 0, turns) for trajectory in random.Random(f"beginnings/{seed}").sample(long_enough, count)
    ]


class _Candidate(NamedTuple):
    """A window, by index; its sums over turns. Sorts by hit."""

    hit: int
    miss: int
    generate: int
    trajectory: int
    start: int


def _candidates(trajectories: Sequence[Trajectory], turns: int) -> list[_Candidate]:
    found: list[_Candidate] = []
    for index, trajectory in enumerate(trajectories):
        lengths = hits(trajectory)
        hit = [0, *accumulate(lengths)]
        prompt = [0, *accumulate(turn.prompt for turn in trajectory.turns)]
        generate = [0, *accumulate(turn.generate for turn in trajectory.turns)]
        for start in range(len(lengths) - turns + 1):
            stop = start + turns
            read = hit[stop] - hit[start]
            miss = prompt[stop] - prompt[start] - read
            found.append(_Candidate(read, miss, generate[stop] - generate[start], index, start))
    return sorted(found)


def _draw(candidates: list[_Candidate], count: int, target: float, rng: random.Random) -> list[_Candidate]:
    """One candidate of each of `count` ranges; target: the mean of their hits."""
    bounds = [i * len(candidates) // count for i in range(count + 1)]
    places = [rng.random() for _ in range(count)]

    def at(shift: float) -> list[_Candidate]:
        shifted = (min(max(place + shift, 0.0), 1.0) for place in places)
        sizes = ((start, stop - start) for start, stop in pairwise(bounds))
        return [
            candidates[start + min(int(place * size), size - 1)]
            for (start, size), place in zip(sizes, shifted, strict=True)
        ]

    def mean(shift: float) -> float:
        return sum(candidate.hit for candidate in at(shift)) / count

    low, high = -1.0, 1.0  # the mean rises with the shift: bisection finds where it passes the target
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < target else (low, middle)
    return at(low)
