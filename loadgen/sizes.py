"""How much an experiment runs, and the points of a sweep."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from common.errors import ConfigError
from loadgen.experiment import Setting


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
QUICK = Size(agents=48, windows=96, turns=3, rounds=1, duration_s=20.0, trials=3)


class Axis(StrEnum):
    """What a sweep varies."""

    AGENTS = "agents"
    MAL = "mal"
    APPEND = "append"
    GENERATION = "generation"
    NODES = "nodes"


def varied(setting: Setting, size: Size, axis: Axis, value: str) -> tuple[Setting, Size]:
    """One point of a sweep. ConfigError for a value that is none."""
    try:
        match axis:
            case Axis.AGENTS:
                return setting, size.given(int(value), None, None, None)
            case Axis.MAL:
                if setting.workload.sessions:
                    raise ConfigError("a sweep of mal is one of sets: leave --sessions out")
                return replace(setting, workload=replace(setting.workload, set=value)), size
            case Axis.APPEND:
                return replace(setting, workload=replace(setting.workload, append_scale=float(value))), size
            case Axis.GENERATION:
                return replace(setting, workload=replace(setting.workload, generation_scale=float(value))), size
            case Axis.NODES:
                prefill, decode = parse_shape(value)
                return replace(setting, prefill=prefill, decode=decode), size
    except ValueError:
        raise ConfigError(f"{value!r} is no value of {axis.value}") from None


def parse_shape(text: str) -> tuple[int, int]:
    """'2P4D' -> (2, 4), nodes. ConfigError."""
    match = re.fullmatch(r"([1-9]\d{0,2})P([1-9]\d{0,2})D", text.strip().upper())
    if match is None:
        raise ConfigError(f"{text!r} is not a shape: write, say, 2P4D for two prefill and four decode nodes")
    return int(match[1]), int(match[2])
