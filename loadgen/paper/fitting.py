"""How the constants of calibration.py were found, and can be found again: `loadgen paper calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from statistics import fmean
from typing import Any

from loadgen.paper.calibration import OFFLINE, ONLINE, Calibration
from loadgen.paper.cases import QUICK, Case, Runner, mean_latency
from loadgen.paper.exhibit import Exhibit, Row
from loadgen.paper.offline import ABLATION_AGENTS, over
from loadgen.paper.published import PUBLISHED

#: Relative; runs of one search at most.
TOLERANCE, RUNS = 0.01, 10
#: Factors of the first step and of the largest one.
FIRST_STEP, LARGEST_STEP = 1.1, 2.0


def solve(start: float, target: float, measure: Callable[[float], float]) -> float:
    """x > 0 with measure(x) = target > 0, to TOLERANCE, by secants of the logarithms; the best x found within RUNS."""
    x, y = start, measure(start)
    best = (abs(log(y / target)), x)
    next_x = x * FIRST_STEP
    for _ in range(RUNS - 1):
        if best[0] <= TOLERANCE:
            break
        next_y = measure(next_x)
        best = min(best, (abs(log(next_y / target)), next_x))
        slope = log(next_y / y) / log(next_x / x) if next_x != x else 0.0
        x, y = next_x, next_y
        limit = log(LARGEST_STEP)
        step = log(target / y) / slope if slope else limit / 4
        next_x = x * exp(min(max(step, -limit), limit))
    return best[1]


def calibrate(runner: Runner) -> Exhibit:
    """Both calibrations, anew, from what they are now."""
    offline = fit_offline(runner)
    online = fit_online(runner, offline.reserve_bytes)
    rows = [
        Row(f"{calibration.name}_{name}", f"{calibration.name}: {name}", unit, getattr(calibration, name))
        for calibration in (offline, online)
        for name, unit in _CONSTANTS.items()
    ]
    return Exhibit("calibrate", "Constants, fitted anew: write them to loadgen/paper/calibration.py", rows)


_CONSTANTS = {"prefill": "of the default", "decode_layer_s": "s", "handover_s": "s", "reserve_bytes": "bytes"}


def fit_offline(runner: Runner) -> Calibration:
    """prefill, to the JCT of 2P4D; then reserve_bytes, which DualPath does not depend on, to the layerwise step, as
    short runs have it."""

    def jct(prefill: float) -> float:
        case = Case("dualpath", agents=2000, calibration=replace(OFFLINE, prefill=prefill))
        return float(runner.run(case)["job_s"])

    def layerwise(reserve_bytes: float) -> float:
        calibration = replace(fitted, reserve_bytes=reserve_bytes)
        points = [Case("basic", agents=agents, calibration=calibration) for agents in ABLATION_AGENTS]
        return fmean(over(windows, point, "basic+layerwise", "basic") for point in points)

    windows = Runner(QUICK, runner.seed, runner.on_progress)
    fitted = replace(OFFLINE, prefill=solve(OFFLINE.prefill, PUBLISHED["jct_s_2p4d"].value, jct))
    target = PUBLISHED["jct_layerwise_over_basic"].value
    return replace(fitted, reserve_bytes=solve(OFFLINE.reserve_bytes, target, layerwise))


def fit_online(runner: Runner, reserve_bytes: float) -> Calibration:
    """decode_layer_s to TPOT, prefill to TTFT, handover_s to TTST, at 2P4D and 0.4 APS, twice: each has some effect on
    the others."""
    fitted = replace(ONLINE, reserve_bytes=reserve_bytes)
    for _ in range(2):
        for constant, latency in (("decode_layer_s", "tpot"), ("prefill", "ttft"), ("handover_s", "ttst")):
            fitted = _with(fitted, constant, _fit_one(runner, fitted, constant, latency))
    return fitted


def _fit_one(runner: Runner, start: Calibration, constant: str, latency: str) -> float:
    def measured(value: float) -> float:
        case = Case("dualpath", aps=0.4, calibration=_with(start, constant, value))
        return mean_latency(runner.run(case), latency)

    return solve(getattr(start, constant), PUBLISHED[f"{latency}_s_2p4d"].value, measured)


def _with(calibration: Calibration, constant: str, value: float) -> Calibration:
    changed: dict[str, Any] = {constant: value}
    return replace(calibration, **changed)
