"""Reader of coding-agent sessions: JSON lines of {"id", "dup", "turns": [[ctx, append, gen, think_s, api_s, kind]]}.

kind: f the first turn, a the context goes on, b a compaction or branch (the context falls back). The first line may be
a header instead: an object with "source" and no "turns". Forks that begin alike carry the same non-null "dup"; the
first of them is kept. What the replay form cannot express is settled here, and counted:
- a branch may return to an older branch, longer than the current history: the context is clipped to the history and
  the rest becomes new tokens, so the prompt keeps its length;
- a turn that generated nothing asks for one token, the least that a request can;
- an unknown think time is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.workload.rows import BadRow, json_object, read_rows, refuse
from common.workload.trajectories import Trajectory, Turn

#: The sessions that come with the package; its header line says where they are from and under which licence.
PACKAGED = Path(__file__).with_name("data") / "agent_sessions.jsonl"

@dataclass(frozen=True, slots=True)
class Sessions:
    """What a file holds. header: its first line, {} if that is a session already. The rest are counts (see above)."""

    trajectories: tuple[Trajectory, ...]
    header: dict[str, Any] = field(default_factory=dict)
    duplicates: int = 0
    clipped: int = 0
    raised: int = 0


def read_sessions(path: Path) -> Sessions:
    """Read a file. ConfigError if it cannot be read, holds no session, or has bad rows (line numbers and reasons)."""
    return read_rows(path, "sessions file", "give an existing file with --sessions", parse_sessions)


def parse_sessions(lines: Iterable[str], source: str) -> Sessions:
    """All sessions, in order, each once; source names them in errors. Every bad row is found before any is refused."""
    header: dict[str, Any] = {}
    trajectories: dict[str, Trajectory] = {}
    forks: set[str] = set()
    duplicates = clipped = raised = 0
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json_object(line)
            if number == 1 and "source" in row and "turns" not in row:
                header = row
                continue
            trajectory, more_clipped, more_raised = _trajectory(row)
            fork = row.get("dup")
            if fork is not None and not isinstance(fork, str):
                raise BadRow('"dup" must be a string or null')
            if trajectory.name in trajectories:
                raise BadRow(f"id {trajectory.name!r} appears twice")
        except BadRow as reason:
            bad.append(f"line {number}: {reason}")
            continue
        if fork in forks:
            duplicates += 1
            continue
        if fork is not None:
            forks.add(fork)
        trajectories[trajectory.name] = trajectory
        clipped += more_clipped
        raised += more_raised
    refuse("sessions file", source, bad)
    if not trajectories:
        raise ConfigError(f"sessions file {source} holds no session")
    return Sessions(tuple(trajectories.values()), header, duplicates, clipped, raised)


def _trajectory(row: dict[str, Any]) -> tuple[Trajectory, int, int]:
    """The trajectory of one row, with how many contexts were clipped and how many generations raised to 1."""
    name, rows = row.get("id"), row.get("turns")
    if not isinstance(name, str) or not name:
        raise BadRow('"id" must be a non-empty string')
    if not isinstance(rows, list) or not rows:
        raise BadRow('"turns" must be a non-empty list')
    turns: list[Turn] = []
    clipped = raised = history = 0
    for index, values in enumerate(rows):
        context, append, generate, think_s, kind = _turn(values, index)
        if (kind == "f") != (index == 0) or (index == 0 and context != 0):
            raise BadRow(f"turn {index}: exactly the first turn has kind f and context 0")
        if context > history:
            if kind == "a":
                raise BadRow(f"turn {index}: context {context} exceeds the {history} tokens of history")
            append += context - history
            context = history
            clipped += 1
        if generate == 0:
            generate = 1
            raised += 1
        turns.append(Turn(context, append, generate, think_s))
        history = turns[-1].total
    return Trajectory(name, tuple(turns)), clipped, raised


def _turn(values: object, index: int) -> tuple[int, int, int, float, str]:
    if not isinstance(values, list) or len(values) != 6:
        raise BadRow(f"turn {index}: not a list of ctx, append, gen, think_s, api_s, kind")
    context, append, generate, think_s, _, kind = values
    for what, length, least in (("ctx", context, 0), ("append", append, 1), ("gen", generate, 0)):
        if type(length) is not int or length < least:
            raise BadRow(f"turn {index}: {what} must be a whole number of at least {least}, not {length!r}")
    if think_s is None:
        think_s = 0.0
    if type(think_s) not in (int, float) or not math.isfinite(think_s) or think_s < 0:
        raise BadRow(f"turn {index}: think_s must be null or seconds of at least 0, not {think_s!r}")
    if kind not in ("f", "a", "b"):
        raise BadRow(f"turn {index}: kind must be f, a or b, not {kind!r}")
    return context, append, generate, float(think_s), kind
