"""Synthetic trajectories with the six columns of the paper's Table 2. No data, no constants beside the table's.

Each parameter follows from the columns (n turns, T tokens in the end, s the generated share of T):
- T = MaxLen * u^theta with u uniform: most runs end near MaxLen, none beyond. theta = MaxLen / total - 1.
- s = gen / (append + gen), the same for every trajectory.
- n is lognormal and independent of T. Then the mean of T / n is total / turns * exp(sigma^2), which has to be
  append + gen: sigma^2 = ln((append + gen) * turns / total).
- The history grows as T * (i / n)^p: front-loaded by appends alone, generations keep the same mean throughout. The mean
  prompt is then about T * (1 / (1 + p) + (1/2 - s) / n), which has to be context. All three sets give p of about 0.7,
  and so do turns against total from one set to the next (28,639 at 60, 42,607 at 106, 55,958 at 157).

What the table does not identify, and is chosen: the lognormal form of n (its sigma follows from the form), the
independence of n and T, one s for all, and the lengths of single turns around their means: Gamma variates of scale 1
(exponential at the average turn) that split the trajectory's appends, and its generations. describe() says so.

n and T are not drawn but taken on a lattice of even quantiles, in which they do not correlate, so the columns hardly
depend on the seed. The seed decides where the lattice starts, the order, and all single lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean
from typing import Any

from common.errors import ConfigError
from common.workload.hits import pooled
from common.workload.table2 import TABLE2, Columns, as_rows, fit_table
from common.workload.trajectories import Trajectory, Turn

#: Trajectories in each of the paper's sets.
SET_SIZE = 500

#: The golden ratio's fraction: multiples of it, modulo 1, are as even as a sequence can be.
_GOLDEN = (math.sqrt(5) - 1) / 2

CHOICES = (
    "not identified by the table: turns lognormal and independent of the total, one generated share for all "
    "trajectories, single lengths Gamma around their means (exponential at the average turn)"
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the columns become (see above). sigma of ln(turns), theta of the total, s, p."""

    sigma: float
    theta: float
    generated_share: float
    growth: float

    @classmethod
    def of(cls, columns: Columns) -> Parameters:
        per_turn = columns.append + columns.generate
        share = columns.generate / per_turn
        mean_inverse_turns = per_turn / columns.total
        filled = columns.context / columns.total - (0.5 - share) * mean_inverse_turns
        return cls(
            sigma=math.sqrt(math.log(per_turn * columns.turns / columns.total)),
            theta=columns.max_length / columns.total - 1,
            generated_share=share,
            growth=1 / filled - 1,
        )


def generate(set_name: str, count: int = SET_SIZE, seed: int = 0) -> list[Trajectory]:
    """count trajectories like the set's, the same for the same arguments. ConfigError if there is no such set.

    A count far below the set's own has few quantiles of the turns: take the first ones of a whole set instead.
    """
    columns = _columns(set_name)
    parameters = Parameters.of(columns)
    rng = random.Random(f"trajectories/{set_name}/{seed}")
    quantiles = [(i + 0.5) / count for i in range(count)]
    spread = [math.exp(parameters.sigma * NormalDist().inv_cdf(q)) for q in quantiles]
    turns = [max(1, round(columns.turns * x / fmean(spread))) for x in spread]
    start = rng.random()
    order = sorted(range(count), key=lambda i: (start + i * _GOLDEN) % 1)
    sizes = [(turns[i], round(columns.max_length * q**parameters.theta)) for i, q in zip(order, quantiles, strict=True)]
    rng.shuffle(sizes)
    return [
        Trajectory(f"{set_name}-{seed}-{index:03}", _turns(num_turns, total, parameters, rng))
        for index, (num_turns, total) in enumerate(sizes)
    ]


def describe(set_name: str, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """For the result: parameters, choices, the table beside the set's, and means over turns."""
    columns = _columns(set_name)
    return {
        "set": set_name,
        "count": len(trajectories),
        "parameters": asdict(Parameters.of(columns)),
        "choices": CHOICES,
        "fit": as_rows(fit_table(trajectories, columns)),
        "pooled": asdict(pooled(trajectories)),
        "shortest_turns": min(len(trajectory.turns) for trajectory in trajectories),
        "longest_turns": max(len(trajectory.turns) for trajectory in trajectories),
    }


def _columns(set_name: str) -> Columns:
    try:
        return TABLE2[set_name]
    except KeyError:
        raise ConfigError(f"no trajectory set {set_name!r}: choose one of {', '.join(TABLE2)}") from None


def _turns(num_turns: int, total: int, parameters: Parameters, rng: random.Random) -> tuple[Turn, ...]:
    share = parameters.generated_share
    generated = round(total * share)
    generates = _split(generated, [1.0] * num_turns, rng)
    # What a turn appends, over the mean: its growth less what it generates. Above 0: p exceeds s in every set.
    grown = [num_turns * (i / num_turns) ** parameters.growth for i in range(num_turns + 1)]
    means = [(after - before - share) / (1 - share) for before, after in pairwise(grown)]
    appends = _split(total - generated, means, rng)
    turns: list[Turn] = []
    history = 0
    for append, length in zip(appends, generates, strict=True):
        turns.append(Turn(history, append, length))
        history = turns[-1].total
    return tuple(turns)


def _split(total: int, means: Sequence[float], rng: random.Random) -> list[int]:
    """total in whole numbers of at least 1 each, beyond that in proportion to Gamma variates with these means."""
    variates = [rng.gammavariate(mean, 1) for mean in means]
    spare = total - len(variates)
    ends = [round(spare * end / sum(variates)) for end in accumulate(variates, initial=0.0)]
    return [1 + after - before for before, after in pairwise(ends)]
