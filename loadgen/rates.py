"""Online experiments: agents that arrive at a rate, and the largest rate that a system serves within its objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError
from common.rundir import RunDirectory
from common.workload.arrivals import poisson_arrivals
from loadgen.capacity import Search
from loadgen.experiment import Setting, store_directory
from loadgen.jobs import plain
from loadgen.lab import Lab
from loadgen.measure import Slo
from loadgen.online import Arrival
from loadgen.placement import placed
from loadgen.progress import OnRun
from loadgen.systems import BOUND_AS
from loadgen.trial import Online, trial

#: The first rate of a search, as a share of what the planner's formula allows.
FIRST_SHARE = 0.6
#: Share of the turns that may miss an objective at the 99th percentile, with some room: the percentile is taken over
#: the last window only.
HOPELESS_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Window:
    """For how many real seconds agents arrive, and the objectives of their turns."""

    duration_s: float
    slo: Slo


def arrivals(setting: Setting, aps: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Agents that start in a run, decided by the seed: each plays a window of its own. ConfigError if nobody comes."""
    times = poisson_arrivals(aps, duration_s, setting.seed + seed)
    if not times:
        raise ConfigError(f"no agent arrives in {duration_s:g} s at {aps:g} agents a second: raise --duration or --aps")
    windows = setting.windows(len(times), seed)
    return tuple(
        Arrival(at, f"{window.name}#{number}", window)
        for number, (at, window) in enumerate(zip(times, windows, strict=True))
    )


async def at_rates(
    setting: Setting,
    systems: Sequence[str],
    rates: Sequence[float],
    window: Window,
    namespaces: bool | None,
    on_run: OnRun,
) -> dict[str, Any]:
    """Every system at every rate, in agents a second. {"placement", "runs"}."""
    runs = []
    with (
        RunDirectory(store_directory(_blocks(setting, max(rates) * window.duration_s))) as directory,
        placed(setting.prefill, setting.decode, setting.scaling, namespaces) as placement,
    ):
        lab = setting.lab(placement, directory)
        for aps in rates:
            for system in systems:
                runs.append(await _run(lab, setting, system, aps, window, on_run))
    return {"placement": placement.description, "runs": runs}


async def capacities(
    setting: Setting,
    systems: Sequence[str],
    window: Window,
    tolerance: float,
    trials: int,
    namespaces: bool | None,
    on_run: OnRun,
) -> dict[str, Any]:
    """{"placement", "runs", "capacity"}: for each system the largest rate found that meets the objectives, and the
    least that does not, in agents a second."""
    runs: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    most = max(_bound_aps(setting, system) for system in systems)
    with (
        RunDirectory(store_directory(_blocks(setting, most * window.duration_s))) as directory,
        placed(setting.prefill, setting.decode, setting.scaling, namespaces) as placement,
    ):
        lab = setting.lab(placement, directory)
        for system in systems:
            bound = _bound_aps(setting, system)
            search = Search(FIRST_SHARE * bound, tolerance, trials)
            while not search.done:
                run = await _run(lab, setting, system, search.rate, window, on_run)
                runs.append(run)
                search.tell(run["verdict"]["met"])
            found[system] = {"aps": search.met, "failed_aps": search.failed, "bound_aps": bound}
    return {"placement": placement.description, "runs": runs, "capacity": found}


async def _run(
    lab: Lab, setting: Setting, system: str, aps: float, window: Window, on_run: OnRun
) -> dict[str, Any]:
    coming = arrivals(setting, aps, window.duration_s, seed=0)
    offered = len(coming) * setting.turns
    until_s = coming[-1].at + window.slo.ttft_s * 1.5
    load = Online(coming, until_s, math.ceil(HOPELESS_SHARE * offered))
    seeded = await lab.seed(f"aps-{aps:g}", [replace(a.trajectory, name=a.name) for a in coming])
    on_turn = on_run(f"{setting.nodes} {system}, {aps:.3g} agents/s", offered)
    result = await trial(lab, system, load, seeded, window.slo, setting.know_hits, on_turn)
    return {
        "system": system,
        "aps": aps,
        "full_aps": full_aps(setting, aps),
        **setting.place(),
        "bound_as": BOUND_AS[system],
        "bounds": setting.plan.describe(),
        **result,
    }


def full_aps(setting: Setting, aps: float) -> float:
    """The rate of whole trajectories on whole nodes that makes as many turns a second as this one of windows."""
    mean_turns = setting.mean_turn.turns / len(setting.trajectories)
    return aps * setting.turns / mean_turns * setting.scaling.hardware.gpus / setting.gpus


def capacity_ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """aps_A_over_B for every pair with a capacity."""
    known = {system: told["aps"] for system, told in found.items() if told["aps"]}
    return {
        f"aps_{plain(of)}_over_{plain(to)}": known[of] / known[to]
        for of in known
        for to in known
        if of != to and to in ("basic", "oracle")
    }


def _bound_aps(setting: Setting, system: str) -> float:
    return setting.plan.bound(BOUND_AS[system]).turns_per_s / setting.turns


def _blocks(setting: Setting, windows: float) -> int:
    mean = setting.mean_turn
    return round(windows * (mean.hit + 2 * setting.turns * mean.miss) / 64)
