"""Offline experiments: the same job by several systems, in paired and interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any, cast

from common.rundir import RunDirectory
from loadgen.experiments.placement import placed
from loadgen.experiments.setting import Setting, interleaved, store_directory
from loadgen.experiments.trial import trial
from loadgen.measures.turns import Slo
from loadgen.progress import OnRun
from loadgen.systems import BOUND_AS, SYSTEMS
from loadgen.workload.load import Offline

#: Pairs whose ratio of job completion times has a name in `ratios` (where both systems ran): all to these two.
REFERENCES = ("dualpath", "oracle")
#: Names in `ratios`, and where a run's `balance` has them. Attention of live engines is even or not forward by forward:
#: windows of a second also show when heartbeats brought their counters.
BALANCES = {
    "snic_max_over_avg": ("snic", "mean"),
    "attention_max_over_avg": ("attention", "rounds"),
    "attention_first_5_percent_max_over_avg": ("attention", "first_5_percent", "rounds"),
    "attention_1s_max_over_avg": ("attention", "mean"),
}


async def compare(
    setting: Setting,
    systems: Sequence[str],
    agents: int,
    count: int,
    rounds: int,
    whole: bool,
    namespaces: bool | None,
    on_run: OnRun,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Runs of every system in every round on the same `count` windows, `agents` of them at a time; each round has
    windows of its own. whole: to the last agent's end. add takes each run. ConfigError if a cluster does not come up.
    """
    with (
        RunDirectory(store_directory(setting.blocks(count))) as directory,
        placed(setting.prefill, setting.decode, setting.scaling, namespaces) as placement,
    ):
        lab = setting.lab(placement, directory)
        for index, order in groupby(interleaved(systems, rounds), itemgetter(0)):
            load = Offline(setting.windows(count, index), agents, whole)
            async with lab.seeded(load.trajectories) as seeded:
                for _, system in order:
                    on_turn = on_run(f"{setting.nodes} {system}, round {index + 1} of {rounds}", count * setting.turns)
                    result = await trial(lab, system, load, seeded, Slo(), setting.know_hits, on_turn)
                    add(
                        {
                            "system": system,
                            "repeat": index,
                            "agents": agents,
                            "placement": placement.description,
                            **setting.place(),
                            "bound_as": BOUND_AS[system],
                            "bounds": setting.bounds(agents, count),
                            **result,
                        }
                    )


def paired(runs: Sequence[Mapping[str, Any]], of: str, to: str, measure: str) -> list[float]:
    """of's measure over to's, one value a round that has both."""
    values: dict[tuple[str, int], float | None] = {(run["system"], run["repeat"]): run[measure] for run in runs}
    pairs = [(values.get((of, r)), values.get((to, r))) for r in sorted({run["repeat"] for run in runs})]
    return [of_value / to_value for of_value, to_value in pairs if of_value and to_value]


def ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The flat map of a result: medians over rounds, by names that can be looked up."""
    present = [name for name in SYSTEMS if any(run["system"] == name for run in runs)]
    flat = {name: median(values) for name, values in spreads(runs).items()}
    if "basic" in present:
        for of in present[1:]:
            if values := paired(runs, of, "basic", "job_s"):
                flat[f"jct_reduction_{plain(of)}_percent"] = 100 * (1 - median(values))
    for system in present:
        suffix = "" if system == "dualpath" else f"_{plain(system)}"
        for name, path in BALANCES.items():
            told = [_within(run["balance"], path) for run in runs if run["system"] == system]
            if values := [value for value in told if value is not None]:
                flat[f"{name}{suffix}"] = median(values)
    return flat


def _within(told: Any, path: Sequence[str]) -> float | None:
    """What stands there; None where nothing does."""
    for key in path:
        told = told and told.get(key)
    return cast(float | None, told)


def spreads(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The paired values behind each ratio of job completion times."""
    found = {}
    for of, to in pairs(runs):
        for measure, prefix in (("job_s", "jct"), ("makespan_s", "makespan")):
            if values := paired(runs, of, to, measure):
                found[f"{prefix}_{plain(of)}_over_{plain(to)}"] = values
    return found


def pairs(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of which systems there are ratios: each over those of REFERENCES, if they ran."""
    present = [name for name in SYSTEMS if any(run["system"] == name for run in runs)]
    return [
        (of, to) for to in REFERENCES for of in present if to in present and of != to and (of, to) != REFERENCES[::-1]
    ]


def bound_ratios(setting: Setting, runs: Sequence[Mapping[str, Any]], agents: int, count: int) -> dict[str, float]:
    """What the planner's formula alone gives for the ratios of job completion times."""
    return {f"jct_{plain(of)}_over_{plain(to)}": setting.bound_ratio(of, to, agents, count) for of, to in pairs(runs)}


def plain(system: str) -> str:
    """A system's name as a part of a key."""
    return system.lstrip("+").replace("+", "_")
