"""What one run of one system comes to, in the real cluster's time. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median
from typing import Any

from common.messages import MemberStatus
from common.types import Role
from loadgen.measures.balance import FIRST_SHARE, WINDOW_S, Series, described, mean_max_over_avg
from loadgen.measures.observe import Sample
from loadgen.measures.turns import RunLog, Slo, TurnRecord, measure, percentile, steady_window

PARTS = ("scheduling", "allocation", "read", "prefill")
#: Bounds of the validity flags.
MAX_CPU, MAX_LAG_S, MIN_HIT = 0.9, 0.1, 0.99

_SAMPLE = re.compile(r"(\w+)\{(.*)\}")


@dataclass(frozen=True, slots=True)
class Witness:
    """What was seen beside the turns. lags: of the client's event loop, wall seconds; cpu: share of the host's cores;
    cpu_s: CPU seconds of each process. hits: tokens that each turn should hit, by session. logged: from the log of a
    process, which should have none."""

    samples: Sequence[Sample]
    missed_samples: int
    lags: Sequence[float]
    cpu: float
    cpu_s: Mapping[str, float]
    hits: Mapping[str, Sequence[int]]
    logged: str = ""


def unstretched(log: RunLog, factor: float) -> RunLog:
    """The log with all durations divided by factor, the start of the run staying where it is."""

    def at(time: float) -> float:
        return log.started + (time - log.started) / factor

    def turn_at(turn: TurnRecord) -> TurnRecord:
        return replace(
            turn,
            intended=at(turn.intended),
            started=at(turn.started),
            ended=at(turn.ended),
            times=[at(time) for time in turn.times],
            parts={name: seconds / factor for name, seconds in turn.parts.items()},
        )

    return replace(
        log,
        ended=at(log.ended),
        last_start=None if log.last_start is None else at(log.last_start),
        turns=[turn_at(turn) for turn in log.turns],
        cut=[turn_at(turn) for turn in log.cut],
        trajectories=[
            replace(trajectory, intended=at(trajectory.intended), ended=at(trajectory.ended))
            for trajectory in log.trajectories
        ],
    )


def outcome(log: RunLog, slo: Slo, witness: Witness, factor: float, share: float = 1.0) -> dict[str, Any]:
    """A run as JSON (loadgen.report.html says what of it is shown). log is in wall time, which is `factor` times the
    real cluster's. share: of a node's GPUs, hence of its requests, that one here stands for."""
    real = unstretched(log, factor)
    samples = [replace(s, at=log.started + (s.at - log.started) / factor) for s in witness.samples]
    level = steady_window(real) or (real.started, real.ended)
    measured = measure(real, slo)
    rate = level_rate(real)
    job_s = real.offered / rate if rate else None
    first = (-inf, real.started + FIRST_SHARE * (job_s or real.ended - real.started))
    return {
        **measured,
        "makespan_s": real.ended - real.started if len(real.turns) == real.offered else None,
        "job_s": job_s,
        "turns_per_s": rate,
        "ttft_parts_s": _parts(real.turns, fmean),
        "ttft_parts_p50_s": _parts(real.turns, median),
        "balance": {
            "snic": snic_balance(samples, level, real.started, WINDOW_S / share),
            "attention": attention_balance(samples, level, first, real.started),
        },
        "nic_bytes": nic_bytes(samples),
        "cpu_s": dict(witness.cpu_s),
        "validity": _validity(real, measured, witness),
    }


def level_rate(log: RunLog) -> float | None:
    """Turns that ended a second while all agents were active; None if the run was too short to tell."""
    window = steady_window(log)
    if window is None:
        return None
    start, end = window
    ended = sum(start < turn.ended <= end and turn.failure is None for turn in log.turns)
    return ended / (end - start) if ended else None


def _parts(turns: Iterable[TurnRecord], mean: Any) -> dict[str, float]:
    told = [turn.parts for turn in turns if turn.failure is None and turn.parts]
    return {part: mean([parts.get(f"{part}_s", 0.0) for parts in told]) for part in PARTS} if told else {}


# -- balance, while all agents were active --


def snic_balance(
    samples: Sequence[Sample], level: tuple[float, float], started: float, window_s: float
) -> dict[str, Any] | None:
    """max/avg over nodes of bytes through their storage NICs, both ways, over windows in which a node here serves as
    many requests as a whole one in a second: fewer would look less even by chance alone."""
    nodes = {
        status.member.node: [0.0] * len(samples)
        for sample in samples
        for status in sample.members
        if status.member.role is Role.TRAFFIC_MANAGER
    }
    for index, sample in enumerate(samples):
        for (nic, _), value in _nic_counters(sample.members).items():
            node, _, interface = nic.partition("/")
            if interface == "snic" and node in nodes:
                nodes[node][index] += value
    series = Series([sample.at for sample in samples], nodes).between(*level)
    return described(series.thinned(window_s), started, window_s)


def attention_balance(
    samples: Sequence[Sample], level: tuple[float, float], first: tuple[float, float], started: float
) -> dict[str, Any] | None:
    """max/avg over the prefill engines of a group of the time that their attention took, over windows; rounds: over
    forwards. first_5_percent: both over the span `first`. Of the least even group; None without one of several engines.
    """
    groups: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        for status in sample.members:
            if status.member.role is Role.PREFILL:
                value = status.counters.get("attention_seconds_total", 0.0)
                groups.setdefault(status.member.group, {}).setdefault(status.member.name, []).append(value)
    told = []
    for group, engines in groups.items():
        if len(engines) > 1 and all(len(values) == len(samples) for values in engines.values()):
            series = Series([sample.at for sample in samples], engines)
            if balance := described(series.between(*level).thinned(WINDOW_S), started, WINDOW_S):
                balance["rounds"] = _over_rounds(samples, group, level)
                balance["first_5_percent"] = {
                    "until_s": first[1] - started,
                    "mean": mean_max_over_avg(series.between(*first).thinned(WINDOW_S)),
                    "rounds": _over_rounds(samples, group, first),
                }
                told.append(balance)
    return max(told, key=lambda balance: balance["mean"], default=None)


def _over_rounds(samples: Sequence[Sample], group: str, span: tuple[float, float]) -> float | None:
    """max/avg over the engines that meet at a forward, each forward weighed by its time: what the slowest one costs the
    others."""
    sums = [
        [
            sum(
                status.counters.get(f"group_attention_{kind}_seconds_total", 0.0)
                for status in sample.members
                if status.member.role is Role.PREFILL and status.member.group == group
            )
            for kind in ("max", "mean")
        ]
        for sample in samples
        if span[0] <= sample.at <= span[1]
    ]
    if len(sums) < 2 or sums[-1][1] <= sums[0][1]:
        return None
    return (sums[-1][0] - sums[0][0]) / (sums[-1][1] - sums[0][1])


def nic_bytes(samples: Sequence[Sample]) -> dict[str, float]:
    """Live bytes through each NIC, by direction and traffic class, over the run."""
    if not samples:
        return {}
    before, after = (_nic_counters(sample.members) for sample in (samples[0], samples[-1]))
    return {f"{nic} {kind}": value - before.get((nic, kind), 0.0) for (nic, kind), value in sorted(after.items())}


def _nic_counters(members: Iterable[MemberStatus]) -> dict[tuple[str, str], float]:
    """Bytes by (NIC, direction and class), of all processes that moved any through it."""
    totals: dict[tuple[str, str], float] = {}
    for status in members:
        for sample, value in status.counters.items():
            match = _SAMPLE.fullmatch(sample)
            if match is None or match[1] != "nic_bytes_total":
                continue
            labels = dict(label.split("=", 1) for label in match[2].split(","))
            key = (labels["nic"], f"{labels['direction']} {labels['traffic_class']}")
            totals[key] = totals.get(key, 0.0) + value
    return totals


# -- validity --


def _validity(log: RunLog, measured: Mapping[str, Any], witness: Witness) -> dict[str, Any]:
    lag = percentile(sorted(witness.lags), 99) or 0.0
    hit = measured["hit_tokens"]
    expected = sum(witness.hits[turn.session][turn.turn] for turn in log.turns if turn.failure is None)
    warm = hit is not None and expected > 0 and hit >= MIN_HIT * expected
    share = "unknown" if hit is None or not expected else f"{100 * hit / expected:.1f} %"
    wrong = measured["failed"] + measured["violations"]
    return {
        "no_failures": _flag(not wrong, f"{wrong} turns failed or have the wrong length"),
        "client_not_saturated": _flag(lag <= MAX_LAG_S, f"event loop late by {lag * 1e3:.0f} ms (p99)"),
        "not_cpu_bound": _flag(witness.cpu <= MAX_CPU, f"{100 * witness.cpu:.0f} % of the host's CPU time in use"),
        "cache_warm": _flag(warm, f"{share} of the expected hits were hits"),
        "nothing_logged": _flag(not witness.logged, witness.logged),
        "observed": _flag(not witness.missed_samples, f"{witness.missed_samples} samples of the cluster missing"),
    }


def _flag(ok: bool, detail: str) -> dict[str, Any]:
    return {"ok": bool(ok), "detail": detail}
