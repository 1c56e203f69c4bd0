"""Online experiments: agents that arrive at a rate, and the largest rate that a system serves within its objectives."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.rundir import RunDirectory
from common.workload.arrivals import gamma_arrivals
from loadgen.experiments.jobs import plain
from loadgen.experiments.lab import Lab
from loadgen.experiments.placement import placed
from loadgen.experiments.setting import Setting, store_directory
from loadgen.experiments.trial import trial
from loadgen.measures.capacity import Search
from loadgen.measures.turns import Slo
from loadgen.progress import OnRun
from loadgen.systems import BOUND_AS
from loadgen.workload.load import Arrival, Online

#: The first rate of a search, as a share of what the planner's formula allows.
FIRST_SHARE = 0.6
#: Share of the turns that may miss an objective at the 99th percentile, with some room: the percentile is taken over
#: the last window only.
HOPELESS_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Window:
    """For how many real seconds agents arrive, and the objectives of their turns. cv: of the gaps between arrivals."""

    duration_s: float
    slo: Slo
    cv: float = 1.0

    def describe(self) -> dict[str, Any]:
        """For the head of a result."""
        return {"process": "Poisson" if self.cv == 1 else "Gamma", "cv": self.cv, "duration_s": self.duration_s}


def arrivals(setting: Setting, aps: float, window: Window, seed: int) -> tuple[Arrival, ...]:
    """Agents that start in a run, decided by the seed: each plays a window of its own. ConfigError if nobody comes."""
    times = gamma_arrivals(aps, window.duration_s, window.cv, setting.seed + seed)
    if not times:
        raise ConfigError(
            f"no agent arrives in {window.duration_s:g} s at {aps:g} agents a second: raise --duration or --aps"
        )
    return tuple(
        Arrival(at, f"{trajectory.name}#{number}", trajectory)
        for number, (at, trajectory) in enumerate(zip(times, setting.windows(len(times), seed), strict=True))
    )


async def at_rates(
    setting: Setting,
    systems: Sequence[str],
    rates: Sequence[float],
    window: Window,
    namespaces: bool | None,
    on_run: OnRun,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Every system at every rate, in agents a second. add takes each run."""
    with _laboratory(setting, max(rates) * window.duration_s, namespaces) as lab:
        for aps in rates:
            async with _offered(lab, setting, aps, window) as offer:
                for system in systems:
                    add(await _run(lab, setting, system, offer, window, on_run))


async def search(
    setting: Setting,
    systems: Sequence[str],
    window: Window,
    tolerance: float,
    trials: int,
    namespaces: bool | None,
    on_run: OnRun,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """For each system, runs that close in on the largest rate that meets the objectives."""
    most = max(_bound_aps(setting, system) for system in systems)
    with _laboratory(setting, most * window.duration_s, namespaces) as lab:
        for system in systems:
            closing = Search(FIRST_SHARE * _bound_aps(setting, system), tolerance, trials)
            while not closing.done:
                async with _offered(lab, setting, closing.rate, window) as offer:
                    run = await _run(lab, setting, system, offer, window, on_run)
                add(run)
                closing.tell(run["verdict"]["met"])


@contextmanager
def _laboratory(setting: Setting, windows: float, namespaces: bool | None) -> Iterator[Lab]:
    with (
        RunDirectory(store_directory(setting.blocks(windows))) as directory,
        placed(setting.prefill, setting.decode, setting.scaling, namespaces) as placement,
    ):
        yield setting.lab(placement, directory)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What every system gets at this rate, in agents a second: load, in all so many turns, and its store."""

    aps: float
    load: Online
    turns: int
    seeded: Path


@asynccontextmanager
async def _offered(lab: Lab, setting: Setting, aps: float, window: Window) -> AsyncIterator[_Offer]:
    coming = arrivals(setting, aps, window, seed=0)
    turns = len(coming) * setting.turns
    load = Online(coming, coming[-1].at + window.slo.ttft_s * 1.5, math.ceil(HOPELESS_SHARE * turns))
    async with lab.seeded(load.trajectories) as seeded:
        yield _Offer(aps, load, turns, seeded)


async def _run(
    lab: Lab, setting: Setting, system: str, offer: _Offer, window: Window, on_run: OnRun
) -> dict[str, Any]:
    on_turn = on_run(f"{setting.nodes} {system}, {offer.aps:.3g} agents/s", offer.turns)
    result = await trial(lab, system, offer.load, offer.seeded, window.slo, setting.know_hits, on_turn)
    return {
        "system": system,
        "aps": offer.aps,
        "placement": lab.placement.description,
        "full_aps": full_aps(setting, offer.aps),
        **setting.place(),
        "bound_as": BOUND_AS[system],
        "bounds": setting.plan.describe(),
        **result,
    }


def full_aps(setting: Setting, aps: float) -> float:
    """The rate of whole trajectories on whole nodes that makes as many turns a second as this one of windows."""
    mean_turns = setting.mean_turn.turns / len(setting.played.trajectories)
    return aps * setting.turns / mean_turns * setting.scaling.hardware.gpus / setting.gpus


def capacities(setting: Setting, runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each system the largest rate that met the objectives and the least above it that did not, in agents a second,
    beside the planner's bound; None where no run says."""
    found = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        verdicts = [(run["aps"], run["verdict"]["met"]) for run in runs if run["system"] == system]
        met = max((aps for aps, ok in verdicts if ok), default=None)
        failed = min((aps for aps, ok in verdicts if not ok and (met is None or aps > met)), default=None)
        found[system] = {"aps": met, "failed_aps": failed, "bound_aps": _bound_aps(setting, system)}
    return found


def capacity_ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """aps_A_over_B for every pair with a capacity."""
    known = {system: told["aps"] for system, told in found.items() if told["aps"]}
    return {
        f"aps_{plain(of)}_over_{plain(to)}": known[of] / known[to]
        for of in known
        for to in known
        if of != to and to in ("basic", "oracle")
    }


def bound_ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What the planner's formula alone gives for the same pairs."""
    return capacity_ratios({system: {"aps": told["bound_aps"]} for system, told in found.items()})


def _bound_aps(setting: Setting, system: str) -> float:
    return setting.plan.bound(BOUND_AS[system]).turns_per_s / setting.turns

