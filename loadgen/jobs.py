"""Offline experiments: the same job by several systems, in paired and interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from common.rundir import RunDirectory
from loadgen.experiment import Setting, interleaved, store_directory
from loadgen.measure import Slo, TurnRecord
from loadgen.placement import placed
from loadgen.systems import SYSTEMS
from loadgen.trial import Offline, trial

#: Pairs whose ratio of job completion times has a name in `ratios` (where both systems ran): all to these two.
REFERENCES = ("dualpath", "oracle")

OnRun = Callable[[str, int], Callable[[TurnRecord], None]]
"""Told of a run that starts, by its title and number of turns; what it returns is told of each turn."""


async def compare(
    setting: Setting,
    systems: Sequence[str],
    agents: int,
    count: int,
    rounds: int,
    namespaces: bool | None,
    on_run: OnRun,
) -> dict[str, Any]:
    """Runs of every system in every round on the same `count` windows, `agents` of them at a time; each round has
    windows of its own. {"placement", "runs"}. ConfigError if a cluster does not come up."""
    mean = setting.mean_turn
    runs = []
    blocks = round(count * (mean.hit + 2 * setting.turns * mean.miss) / 64)
    with (
        RunDirectory(store_directory(blocks)) as directory,
        placed(setting.prefill, setting.decode, setting.scaling, namespaces) as placement,
    ):
        lab = setting.lab(placement, directory)
        for index, system in interleaved(systems, rounds):
            load = Offline(setting.windows(count, index), agents)
            seeded = await lab.seed(f"round-{index}", load.trajectories)
            on_turn = on_run(f"{setting.nodes} {system}, round {index + 1} of {rounds}", count * setting.turns)
            result = await trial(lab, system, load, seeded, Slo(), setting.know_hits, on_turn)
            runs.append(
                {
                    "system": system,
                    "repeat": index,
                    "agents": agents,
                    **setting.place(),
                    "bounds": setting.bounds(agents, count),
                    **result,
                }
            )
        return {"placement": placement.description, "runs": runs}


def paired(runs: Sequence[Mapping[str, Any]], of: str, to: str, measure: str) -> list[float]:
    """of's measure over to's, one value a round that has both."""
    values: dict[tuple[str, int], float] = {(run["system"], run["repeat"]): run[measure] for run in runs}
    rounds = sorted({run["repeat"] for run in runs})
    return [values[of, r] / values[to, r] for r in rounds if (of, r) in values and values.get((to, r))]


def ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The flat map of a result: medians over rounds, by names that can be looked up."""
    present = [name for name in SYSTEMS if any(run["system"] == name for run in runs)]
    flat: dict[str, float] = {}
    for to in REFERENCES:
        for of in present:
            if of != to and to in present and not (of == "oracle" and to == "dualpath"):
                for measure, prefix in (("job_s", "jct"), ("makespan_s", "makespan")):
                    flat[f"{prefix}_{plain(of)}_over_{plain(to)}"] = median(paired(runs, of, to, measure))
    if "basic" in present:
        for of in present[1:]:
            flat[f"jct_reduction_{plain(of)}_percent"] = 100 * (1 - median(paired(runs, of, "basic", "job_s")))
    for name in present:
        for kind in ("snic", "attention"):
            told = [run["balance"][kind]["mean"] for run in runs if run["system"] == name and run["balance"][kind]]
            if told:
                suffix = "" if name == "dualpath" else f"_{plain(name)}"
                flat[f"{kind}_max_over_avg{suffix}"] = median(told)
    return flat


def spreads(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """All paired values behind the ratios of job completion times."""
    present = [name for name in SYSTEMS if any(run["system"] == name for run in runs)]
    return {
        f"jct_{plain(of)}_over_{plain(to)}": paired(runs, of, to, "job_s")
        for to in REFERENCES
        for of in present
        if of != to and to in present
    }


def plain(system: str) -> str:
    """A system's name as a part of a key."""
    return system.lstrip("+").replace("+", "_")
