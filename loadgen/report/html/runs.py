"""Runs out of result files, as far as they say something: the one place that knows the JSON (see the package). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from loadgen.systems import BOUND_AS

PARTS = ("scheduling", "allocation", "read", "prefill")
LATENCIES = ("ttft", "ttst", "tpot", "jct")
#: What sweeps vary, with units.
AXES = {
    "agents": "agents",
    "mal": "max agent length (tokens)",
    "append_scale": "append length (× native)",
    "generation_scale": "generation length (× native)",
    "nodes": "prefill and decode nodes",
}

Value = float | str
Place = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """max/avg over nodes or engines. mean: over the windows that end at at_s. overall: forward by forward where that is
    known, else the mean."""

    mean: float | None
    overall: float | None
    at_s: Sequence[float]
    max_over_avg: Sequence[float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one system.

    place: what it shares with those that it may be compared with, by the names of AXES and "model", "aps". latency: of
    LATENCIES, each with mean, p50, p99 where known. broken: flags that do not hold. repeat: runs of one are paired.
    """

    system: str
    place: Mapping[str, Value]
    job_s: float | None
    makespan_s: float | None
    latency: Mapping[str, Mapping[str, float]]
    parts_s: Mapping[str, float]
    slo: Mapping[str, float]
    balance: Mapping[str, Balance]
    bound_s: float | None
    bound_by: str
    broken: Sequence[str]
    given_up: bool
    stationary: bool
    repeat: str = ""

    @property
    def doubtful(self) -> bool:
        return self.given_up or not self.stationary or bool(self.broken)

    @property
    def measured(self) -> bool:
        return bool(self.job_s or self.makespan_s or any(self.latency.values()) or self.parts_s or self.balance)

    def without(self, *axes: str) -> Place:
        """Its place but for these: equal for runs that differ in them only."""
        return tuple(sorted((name, value) for name, value in self.place.items() if name not in axes))


def read_runs(results: Iterable[Mapping[str, Any]]) -> list[Run]:
    """All runs of all results that measured something. Runs of two results are no repeats of one another; a run that
    does not say which repeat it is counts those of its system and place before it."""
    runs: list[Run] = []
    for number, result in enumerate(results):
        shared = {name: value for name, value in result.items() if name not in ("runs", "validity")}
        before: Counter[tuple[str, Place]] = Counter()
        found = []
        for told in result.get("runs") or [result]:
            run = _run({**shared, **told})
            index = told.get("repeat", before[run.system, run.without()])
            before[run.system, run.without()] += 1
            if run.measured:
                found.append(replace(run, repeat=f"{number}.{index}"))
        runs += _comparable(found)
    return runs


def broken_flags(validity: Mapping[str, Any] | None) -> list[str]:
    """The flags that do not hold, each with its detail."""
    broken = []
    for name, flag in (validity or {}).items():
        holds, detail = (flag.get("ok"), flag.get("detail")) if isinstance(flag, Mapping) else (flag, None)
        if holds is False:
            broken.append(f"{name}: {detail}" if detail else name)
    return broken


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least, greatest."""
    return median(values), min(values), max(values)


def ratios(runs: Iterable[Run], of: str, to: str) -> list[float]:
    """Job completion time of one system over that of another, one value a repeat that has both."""
    jobs: dict[str, dict[str, float]] = {of: {}, to: {}}
    for run in runs:
        if run.system in jobs and run.job_s is not None:
            jobs[run.system][run.repeat] = run.job_s
    return [jobs[of][repeat] / jobs[to][repeat] for repeat in jobs[of] if jobs[to].get(repeat)]


def telling(runs: Iterable[Run]) -> list[tuple[Place, list[Run]]]:
    """One set of runs for each model, nodes and kind of load (agents or APS): the one with the most systems, and of
    these the one with the most load. With its place."""
    sets: dict[Place, list[Run]] = {}
    for run in runs:
        sets.setdefault(run.without(), []).append(run)
    best: dict[tuple[object, ...], tuple[tuple[int, float], Place]] = {}
    for place, group in sets.items():
        shared = dict(place)
        cluster = (shared.get("model"), shared.get("nodes"), "aps" in shared)
        load = _number(shared.get("aps", shared.get("agents"))) or 0.0
        rank = (len({run.system for run in group}), load)
        if cluster not in best or rank > best[cluster][0]:
            best[cluster] = (rank, place)
    return [(place, sets[place]) for _, place in best.values()]


def _comparable(runs: Sequence[Run]) -> list[Run]:
    """The same with one measure of job completion time in each place: the makespan where a run has no other."""
    short = {run.without() for run in runs if run.job_s is None}
    return [replace(run, job_s=run.makespan_s) if run.without() in short else run for run in runs]


def _run(run: Mapping[str, Any]) -> Run:
    system = str(run.get("system") or "as served")
    online = run.get("aps") is not None  # a stream of agents is no job
    bound = {} if online else ((run.get("bounds") or {}).get("systems") or {}).get(BOUND_AS.get(system, ""), {})
    return Run(
        system=system,
        place={axis: run[axis] for axis in (*AXES, "model", "aps") if run.get(axis) is not None},
        job_s=None if online else _number(run.get("job_s")),
        makespan_s=None if online else _number(run.get("makespan_s")),
        latency={measure: _summary(run, measure) for measure in LATENCIES},
        parts_s=_numbers(run.get("ttft_parts_s")),
        slo=_numbers(run.get("slo")),
        balance={kind: _balance(told) for kind, told in (run.get("balance") or {}).items() if told},
        bound_s=_number(bound.get("job_completion_s")),
        bound_by=str(bound.get("bound_by", "")),
        broken=broken_flags(run.get("validity")),
        given_up=bool(run.get("given_up")),
        stationary=(run.get("verdict") or {}).get("stationary") is not False,
    )


def _summary(run: Mapping[str, Any], measure: str) -> dict[str, float]:
    for told in ((run.get("verdict") or {}).get(f"window_{measure}_s"), run.get(f"{measure}_s")):
        if told is not None:
            return _numbers(told)
    return {name: value / 1e3 for name, value in _numbers(run.get(f"{measure}_ms")).items()}


def _balance(told: Mapping[str, Any]) -> Balance:
    pairs = zip(told.get("at_s", ()), told.get("max_over_avg", ()), strict=False)
    known = [(at, ratio) for at, ratio in pairs if ratio is not None]
    mean, rounds = _number(told.get("mean")), _number(told.get("rounds"))
    return Balance(mean, mean if rounds is None else rounds, [at for at, _ in known], [ratio for _, ratio in known])


def _numbers(told: object) -> dict[str, float]:
    items = told.items() if isinstance(told, Mapping) else ()
    return {name: number for name, value in items if (number := _number(value)) is not None}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
