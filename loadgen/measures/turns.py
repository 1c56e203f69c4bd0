"""From times to measures, without I/O (terms of the field; spec §10). Every time is the client's one monotonic clock.

TTFT   intended start of a turn to its first token: a late send is part of the latency, not hidden by it (case E09).
TTST   first token to second token (the hand-over to the decode engine is in it).
TPOT   (last token - first token) / (tokens received - 1), one value a turn of 2 tokens or more.
ITL    every gap between consecutive tokens, pooled; tokens of one event share its time.
JCT    intended start of a trajectory to its last token, one value a completed trajectory.
goodput   turns a second that ended well, had the right length and met both TTFT and TPOT objectives; a turn of one
       token has no TPOT to miss.

A failed turn has no latencies. A turn of the wrong length (a violation) keeps its latencies, by its real length, but
is not good. Percentiles are nearest-rank: the smallest value with at least p % of all values at or below it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILE_METHOD = "nearest-rank"
#: Below this a p99 is the maximum, and says so.
FEW_SAMPLES = 100

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of a turn, in seconds."""

    ttft_s: float = 4.0
    tpot_s: float = 0.05


@dataclass(slots=True)
class TurnRecord:
    """One turn that was sent and came to an end. times[i]: arrival of token i; requested: tokens asked for.

    parts: of the time to first token, seconds, as the server tells them.
    failure and detail: why it failed, None if it ended well. violations: what was wrong with a turn that ended well.
    """

    session: str
    turn: int
    intended: float
    started: float
    ended: float
    prompt_tokens: int
    requested: int
    times: list[float]
    parts: dict[str, float] = field(default_factory=dict)
    cached_tokens: int | None = None
    failure: str | None = None
    detail: str = ""
    violations: list[str] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.intended if self.times else None

    @property
    def ttst(self) -> float | None:
        return self.times[1] - self.times[0] if len(self.times) > 1 else None

    @property
    def tpot(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def meets(self, slo: Slo) -> bool:
        """True for a turn that counts as goodput."""
        if self.failure is not None or self.violations or self.ttft is None:
            return False
        return self.ttft <= slo.ttft_s and (self.tpot is None or self.tpot <= slo.tpot_s)


@dataclass(slots=True)
class TrajectoryRecord:
    """One trajectory that ended: at its last token, or (completed False) with the turn that failed."""

    session: str
    intended: float
    ended: float
    completed: bool


@dataclass(slots=True)
class RunLog:
    """What happened in one run. offered: turns that were to be sent, attempted: turns that were sent.

    last_start: when the last trajectory started, None as long as more are to start. cut: turns that were under way when
    the run was ended, with the tokens that had come.
    """

    offered: int
    started: float
    ended: float = 0.0
    attempted: int = 0
    last_start: float | None = None
    interrupted: bool = False
    turns: list[TurnRecord] = field(default_factory=list)
    cut: list[TurnRecord] = field(default_factory=list)
    trajectories: list[TrajectoryRecord] = field(default_factory=list)


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """Nearest-rank percentile of ascending values, 0 < p <= 100; None of nothing."""
    return ordered[max(math.ceil(p / 100 * len(ordered)), 1) - 1] if ordered else None


def summary(values: Iterable[float | None], factor: float = 1.0) -> dict[str, Any]:
    """Mean and percentiles of the values that exist, times factor; excluded counts those that are None (case E04)."""
    every = list(values)
    ordered = sorted(value * factor for value in every if value is not None)
    return {
        "p50": _rounded(percentile(ordered, 50)),
        "p95": _rounded(percentile(ordered, 95)),
        "p99": _rounded(percentile(ordered, 99)),
        "mean": _rounded(math.fsum(ordered) / len(ordered) if ordered else None),
        "n": len(ordered),
        "excluded": len(every) - len(ordered),
        "few_samples": len(ordered) < FEW_SAMPLES,
    }


def steady_window(log: RunLog) -> tuple[float, float] | None:
    """The part of the run in which the load was level: neither ramp nor drain (case E14).

    From the end of the first completed trajectory (before it, agents only start) to the start of the last one (after
    it, they only end). None if a run is too short to have one.
    """
    first_end = min((trajectory.ended for trajectory in log.trajectories if trajectory.completed), default=None)
    if first_end is None or log.last_start is None or log.last_start <= first_end:
        return None
    return first_end, log.last_start


def rates(log: RunLog, window: tuple[float, float], slo: Slo) -> dict[str, Any]:
    """Turns and tokens a second of the turns that ended in (start, end]. Null for a window of no length."""
    start, end = window
    length = end - start
    ended = [turn for turn in log.turns if start < turn.ended <= end]
    well = [turn for turn in ended if turn.failure is None]

    def per_second(count: int) -> float | None:
        return _rounded(count / length) if length > 0 else None

    return {
        "from_s": _rounded(start - log.started),
        "to_s": _rounded(end - log.started),
        "ended_rps": per_second(len(ended)),
        "completed_rps": per_second(len(well)),
        "goodput_rps": per_second(sum(turn.meets(slo) for turn in well)),
        "generated_tokens_per_s": per_second(sum(len(turn.times) for turn in well)),
    }


def measure(log: RunLog, slo: Slo) -> dict[str, Any]:
    """Everything that a run says, ready for JSON: no NaN, no infinity, null where there is nothing to say."""
    well = [turn for turn in log.turns if turn.failure is None]
    failed = [turn for turn in log.turns if turn.failure is not None]
    cached = [turn.cached_tokens for turn in well]
    hit = None if None in cached else sum(count for count in cached if count is not None)
    prompt = sum(turn.prompt_tokens for turn in well)
    whole = rates(log, (log.started, log.ended), slo)
    steady = steady_window(log)
    ended = [trajectory for trajectory in log.trajectories if trajectory.completed]
    return {
        "turns": len(well),
        "failed": len(failed),
        "offered": log.offered,
        "attempted": log.attempted,
        "unfinished": log.attempted - len(log.turns),
        "interrupted": log.interrupted,
        "failures": dict(Counter(str(turn.failure) for turn in failed)),
        "violations": sum(bool(turn.violations) for turn in well),
        "problems": [_problem(turn) for turn in log.turns if turn.failure is not None or turn.violations][:_SHOWN],
        "trajectories": {"completed": len(ended), "failed": len(log.trajectories) - len(ended)},
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "computed_tokens": None if hit is None else prompt - hit,
        "generated_tokens": sum(len(turn.times) for turn in well),
        "ttft_ms": summary((turn.ttft for turn in well), 1e3),
        "ttft_from_send_ms": summary((turn.times[0] - turn.started for turn in well), 1e3),
        "ttst_ms": summary((turn.ttst for turn in well), 1e3),
        "tpot_ms": summary((turn.tpot for turn in well), 1e3),
        "itl_ms": summary((gap for turn in well for gap in turn.gaps), 1e3),
        "jct_s": summary(trajectory.ended - trajectory.intended for trajectory in ended),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "goodput_rps": whole["goodput_rps"],
        "rates": {"whole": whole, "steady": rates(log, steady, slo) if steady else None},
        "percentile_method": PERCENTILE_METHOD,
    }


def rows(log: RunLog) -> list[dict[str, Any]]:
    """One row a turn for whoever wants to look again; times in seconds since the start of the run."""
    return [
        {
            "session": turn.session,
            "turn": turn.turn,
            "intended_s": _rounded(turn.intended - log.started),
            "started_s": _rounded(turn.started - log.started),
            "first_token_s": _rounded(turn.times[0] - log.started) if turn.times else None,
            "last_token_s": _rounded(turn.times[-1] - log.started) if turn.times else None,
            "ended_s": _rounded(turn.ended - log.started),
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "requested_tokens": turn.requested,
            "generated_tokens": len(turn.times),
            "failure": turn.failure,
            "violations": turn.violations,
        }
        for turn in log.turns
    ]


def _problem(turn: TurnRecord) -> str:
    what = f"{turn.failure}: {turn.detail}" if turn.failure is not None else "; ".join(turn.violations)
    return f"{turn.session} turn {turn.turn}: {what}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
