"""What a run comes to, in the form of a live run (loadgen.measures.outcome), so that the same tables and pages show it.

Everything is taken from arrays, by the definitions of loadgen.measures: a run may have millions of turns.
"""

from __future__ import annotations

import math
import resource
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measures.balance import FIRST_SHARE, WINDOW_S, Series, described, mean_max_over_avg
from loadgen.measures.capacity import PERCENTILE, RULE, WINDOW_SHARE, rises
from loadgen.measures.turns import FEW_SAMPLES, PERCENTILE_METHOD
from loadgen.simulator.decode import DecodeEngine
from loadgen.simulator.records import SPANS
from loadgen.simulator.run import Simulation
from loadgen.workload.load import Online

Values = NDArray[np.float64]
Span = tuple[float, float]
PARTS = SPANS[SPANS.index("scheduling") :]
#: Parts of a run that its series tell of.
SERIES_POINTS = 100


def summary(values: Values, factor: float = 1.0) -> dict[str, Any]:
    """As loadgen.measures.turns.summary(), of values that may be no numbers."""
    ordered = np.sort(values[~np.isnan(values)]) * factor
    count = len(ordered)

    def rank(p: float) -> float | None:
        return _rounded(ordered[max(math.ceil(p / 100 * count), 1) - 1]) if count else None

    return {
        "p50": rank(50),
        "p95": rank(95),
        "p99": rank(99),
        "mean": _rounded(ordered.mean()) if count else None,
        "n": count,
        "excluded": len(values) - count,
        "few_samples": count < FEW_SAMPLES,
    }


def result(run: Simulation, cpu_s: float) -> dict[str, Any]:
    """A run that has ended, as JSON. cpu_s: what it has cost."""
    records, agents, scenario = run.records, run.agents, run.scenario
    ended, trajectories = records.column("ended"), records.trajectories
    ttft, tpot = records.column("ttft"), records.column("tpot")
    level = _level(run)
    rate = _rate(ended, level) if level else None
    makespan_s = run.ended_at if len(ended) == agents.offered else None
    job_s = agents.offered / rate if rate else makespan_s
    slo = scenario.slo
    good = (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
    whole = (0.0, run.ended_at)
    failed = sum(agents.failed.values())
    told: dict[str, Any] = {
        "turns": records.num_turns,
        "failed": failed,
        "offered": agents.offered,
        "attempted": agents.attempted,
        "unfinished": agents.attempted - records.num_turns - failed,
        "interrupted": agents.given_up,
        "failures": dict(agents.failed),
        "violations": 0,
        "problems": [],
        "trajectories": {"completed": len(trajectories), "failed": failed},
        "prompt_tokens": records.prompt_tokens,
        "hit_tokens": records.hit_tokens,
        "computed_tokens": records.prompt_tokens - records.hit_tokens,
        "generated_tokens": records.generated_tokens,
        "ttft_ms": summary(ttft, 1e3),
        "ttft_from_send_ms": summary(ttft, 1e3),
        "ttst_ms": summary(records.column("ttst"), 1e3),
        "tpot_ms": summary(tpot, 1e3),
        "jct_s": summary(trajectories[:, 1] - trajectories[:, 0]),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "goodput_rps": _rounded(good.sum() / run.ended_at) if run.ended_at else None,
        "rates": {"whole": _rates(run, whole, good), "steady": _rates(run, level, good) if level else None},
        "percentile_method": PERCENTILE_METHOD,
        "makespan_s": makespan_s,
        "job_s": job_s,
        "turns_per_s": rate if rate else _rate(ended, whole),
        "ttft_parts_s": _parts(run, np.mean),
        "ttft_parts_p50_s": _parts(run, np.median),
        "series": _series(run),
        "balance": _balance(run, level or _first_half(run), (0.0, FIRST_SHARE * (job_s or run.ended_at))),
        "nic_bytes": nic_bytes(run),
        "validity": {
            "no_failures": _flag(not failed, f"{failed} turns failed"),
            "no_other_attempts": _flag(True, f"{run.failed_requests} attempts were lost"),
        },
        "preemptions": sum(e.preemptions for e in run.engines.values() if isinstance(e, DecodeEngine)),
        "simulator": _cost(run, cpu_s),
    }
    if scenario.roles is not None:
        told["roles"] = scenario.roles.describe()
    if isinstance(scenario.load, Online):
        told["given_up"] = agents.given_up
        told["verdict"] = verdict(run)
    return told


def verdict(run: Simulation) -> dict[str, Any]:
    """As loadgen.measures.capacity.verdict(): what an online run says about its rate."""
    last_start = run.agents.last_start
    end = run.ended_at if last_start is None else min(last_start, run.ended_at)
    length = end * WINDOW_SHARE
    cut = run.agents.under_way(run.requests.values())
    due = np.concatenate([run.records.column("due"), cut[:, 0]])
    ttft = np.concatenate([run.records.column("ttft"), cut[:, 1]])
    tpot = np.concatenate([run.records.column("tpot"), np.full(len(cut), np.nan)])
    before, last = ((due > end - n * length) & (due <= end - (n - 1) * length) for n in (2, 1))
    told, earlier = summary(ttft[last]), summary(ttft[before])
    pace = summary(tpot[last])
    slo = run.scenario.slo
    stationary = bool(
        told["n"]
        and earlier["n"]
        and not told["excluded"]
        and not earlier["excluded"]
        and not rises(earlier["mean"], told["mean"], slo)
    )
    within = bool(
        not run.agents.given_up
        and told["n"]
        and pace["n"]
        and told[f"p{PERCENTILE}"] <= slo.ttft_s
        and pace["mean"] <= slo.tpot_s
    )
    return {
        "window_ttft_s": told,
        "window_tpot_s": pace,
        "stationary": stationary,
        "within_slo": within,
        "met": within and stationary,
        "rule": RULE,
    }


def nic_bytes(run: Simulation) -> dict[str, float]:
    """Bytes through each NIC, by direction and traffic class, over the run."""
    told: dict[str, float] = {}
    for node in run.nodes.values():
        told[f"{node.name}/snic rx kv"] = node.snic_in.served(run.ended_at)
        if node.snic_out.sent:
            told[f"{node.name}/snic tx background"] = node.snic_out.sent
        for engine in node.engines:
            nic = f"{node.name}/{engine.name}/cnic"
            for direction, link in (("rx", engine.rx), ("tx", engine.tx)):
                told[f"{nic} {direction} kv"] = link.sent - engine.persisted
                if engine.persisted:
                    told[f"{nic} {direction} background"] = engine.persisted
    return dict(sorted(told.items()))


# -- parts --


def _level(run: Simulation) -> Span | None:
    """While all agents were active: from the first trajectory's end to the last one's start."""
    trajectories, last_start = run.records.trajectories, run.agents.last_start
    if not len(trajectories) or last_start is None:
        return None
    first_end = float(trajectories[:, 1].min())
    return (first_end, last_start) if last_start > first_end else None


def _first_half(run: Simulation) -> Span:
    """Where all trajectories start at once: until half of them have ended."""
    ends = run.records.trajectories[:, 1]
    return 0.0, float(np.median(ends)) if len(ends) else run.ended_at


def _rate(ended: Values, span: Span) -> float | None:
    start, end = span
    count = int(((ended > start) & (ended <= end)).sum())
    return count / (end - start) if count and end > start else None


def _series(run: Simulation) -> dict[str, list[float | None]]:
    """Over the run, in SERIES_POINTS equal parts that end at at_s: turns and prompt tokens that ended a second, and
    mean latencies of these turns; None where none ended."""
    records = run.records
    edges = np.linspace(0.0, run.ended_at, SERIES_POINTS + 1)
    ended = records.column("ended")
    part_s = run.ended_at / SERIES_POINTS or 1.0

    def binned(weights: Values | None = None) -> Values:
        return np.histogram(ended, edges, weights=weights)[0].astype(float)

    def means(name: str) -> list[float | None]:
        values = records.column(name)
        known = ~np.isnan(values)
        counts = np.histogram(ended[known], edges)[0]
        sums = np.histogram(ended[known], edges, weights=values[known])[0]
        return [_rounded(total / count) if count else None for total, count in zip(sums, counts, strict=True)]

    return {
        "at_s": [_rounded(edge) for edge in edges[1:]],
        "turns_per_s": [_rounded(value / part_s) for value in binned()],
        "prompt_tokens_per_s": [_rounded(value / part_s) for value in binned(records.prompts.astype(float))],
        "ttft_s": means("ttft"),
        "tpot_s": means("tpot"),
    }


def _rates(run: Simulation, span: Span, good: NDArray[np.bool_]) -> dict[str, Any]:
    ended = run.records.column("ended")
    within = (ended > span[0]) & (ended <= span[1])
    length = span[1] - span[0]

    def per_second(count: float) -> float | None:
        return _rounded(count / length) if length > 0 else None

    share = within.sum() / max(len(ended), 1)
    return {
        "from_s": _rounded(span[0]),
        "to_s": _rounded(span[1]),
        "ended_rps": per_second(within.sum()),
        "completed_rps": per_second(within.sum()),
        "goodput_rps": per_second((within & good).sum()),
        "generated_tokens_per_s": per_second(share * run.records.generated_tokens),
    }


def _parts(run: Simulation, mean: Any) -> dict[str, float]:
    if not run.records.num_turns:
        return {}
    return {part: float(mean(run.records.column(part))) for part in PARTS}


def _balance(run: Simulation, level: Span, first: Span) -> dict[str, Any]:
    cluster, sampler = run.scenario.cluster, run.sampler
    window_s = WINDOW_S * cluster.hardware.gpus / (cluster.engines * cluster.gpus)
    return {
        "snic": described(sampler.snic.between(*level).thinned(window_s), 0.0, window_s),
        "attention": _attention(run, level, first),
    }


def _attention(run: Simulation, level: Span, first: Span) -> dict[str, Any] | None:
    """Of the least even group of several engines."""
    rounds = run.sampler.rounds
    found = []
    for group, series in run.sampler.attention.items():
        if len(series.values) > 1 and (told := described(series.between(*level).thinned(WINDOW_S), 0.0, WINDOW_S)):
            told["rounds"] = _over_rounds(rounds[group].between(*level))
            told["first_5_percent"] = {
                "until_s": first[1],
                "mean": mean_max_over_avg(series.between(*first).thinned(WINDOW_S)),
                "rounds": _over_rounds(rounds[group].between(*first)),
            }
            found.append(told)
    return max(found, key=lambda told: float(told["mean"]), default=None)


def _over_rounds(series: Series) -> float | None:
    if len(series.times) < 2:
        return None
    slowest, mean = (series.values[name][-1] - series.values[name][0] for name in ("slowest", "mean"))
    return slowest / mean if mean > 0 else None


def _cost(run: Simulation, cpu_s: float) -> dict[str, Any]:
    turns = max(run.records.num_turns, 1)
    return {
        "events": run.clock.events,
        "events_a_turn": run.clock.events / turns,
        "cpu_s": cpu_s,
        "cpu_us_a_turn": 1e6 * cpu_s / turns,
        "policy_cpu_s": run.policy_s,
        "policy_share": run.policy_s / cpu_s if cpu_s else None,
        "policy_cores": run.policy_s / run.ended_at if run.ended_at else None,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _flag(ok: bool, detail: str) -> dict[str, Any]:
    return {"ok": ok, "detail": detail}


def _rounded(value: float) -> float:
    return round(float(value), 6)
