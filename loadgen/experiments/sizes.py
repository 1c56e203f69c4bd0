"""How much an experiment runs, and the points of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, nan

from common.errors import ConfigError
from compose.fabric import parse_shape
from loadgen.experiments.setting import Setting


@dataclass(frozen=True, slots=True)
class Size:
    """agents at a time, windows in all, turns of each; paired rounds; real seconds of arrivals; trials of a search."""

    agents: int
    windows: int
    turns: int
    rounds: int
    duration_s: float
    trials: int

    def given(self, agents: int | None, windows: int | None, turns: int | None, rounds: int | None) -> Size:
        """With these instead. Windows grow with agents where they are not given."""
        if agents is not None and windows is None:
            windows = round(self.windows * agents / self.agents)
        asked = {"agents": agents, "windows": windows, "turns": turns, "rounds": rounds}
        return replace(self, **{name: value for name, value in asked.items() if value is not None})


FULL = Size(agents=128, windows=320, turns=4, rounds=3, duration_s=60.0, trials=7)
QUICK = Size(agents=48, windows=96, turns=3, rounds=1, duration_s=14.0, trials=3)


class Axis(StrEnum):
    """What a sweep varies."""

    AGENTS = "agents"
    MAL = "mal"
    APPEND = "append"
    GENERATION = "generation"
    NODES = "nodes"


def varied(setting: Setting, size: Size, axis: Axis, value: str) -> tuple[Setting, Size]:
    """One point of a sweep. ConfigError for a value that is none."""
    match axis:
        case Axis.AGENTS:
            return setting, size.given(_whole(axis, value), None, None, None)
        case Axis.MAL:
            if setting.workload.sessions:
                raise ConfigError("a sweep of mal is one of sets: leave --sessions out")
            return replace(setting, workload=replace(setting.workload, set=value)), size
        case Axis.APPEND:
            return replace(setting, workload=replace(setting.workload, append_scale=_factor(axis, value))), size
        case Axis.GENERATION:
            return replace(setting, workload=replace(setting.workload, generation_scale=_factor(axis, value))), size
        case Axis.NODES:
            prefill, decode = parse_shape(value)
            return replace(setting, prefill=prefill, decode=decode), size


def _whole(axis: Axis, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ConfigError(f"sweep {axis.value}: {value!r} is not a whole number above 0")
    return int(value)


def _factor(axis: Axis, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = nan
    if not 0 < factor < inf:
        raise ConfigError(f"sweep {axis.value}: {value!r} is not a number above 0")
    return factor
