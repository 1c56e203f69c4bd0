"""What the policy was told and what it decided, as JSON lines: a run that can be replayed.

The first line is the configuration, every other one a step. Numbers come back exactly as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO, get_args

from pydantic import TypeAdapter

from services.scheduler.policy.actions import Action
from services.scheduler.policy.events import Event
from services.scheduler.policy.policy import Policy
from services.scheduler.policy.state import PolicyConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One call of Policy.handle(). now: seconds on the run's clock."""

    now: float
    event: Event
    actions: list[Action]


class Recorder:
    """Owns the file that it writes to."""

    def __init__(self, file: TextIO, config: PolicyConfig) -> None:
        self._file = file
        self._line(asdict(config))

    def write(self, step: Step) -> None:
        self._line([step.now, _plain(step.event), [_plain(action) for action in step.actions]])

    def _line(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def read_record(lines: Iterable[str]) -> tuple[PolicyConfig, list[Step]]:
    """What a recorder wrote. ValueError if it is not that; a last line that is not whole was being written."""
    first, *others = lines
    steps = [_step(json.loads(line)) for line in others if line.endswith("\n")]
    return TypeAdapter(PolicyConfig).validate_json(first), steps


def replay(config: PolicyConfig, steps: Iterable[Step]) -> list[tuple[Step, list[Action]]]:
    """The steps in which a fresh policy decides otherwise, each with what it decides. Empty: it decides alike."""
    policy = Policy(config)
    decided = ((step, policy.handle(step.event, step.now)) for step in steps)
    return [(step, actions) for step, actions in decided if actions != step.actions]


def _plain(value: Event | Action) -> list[object]:
    return [type(value).__name__, asdict(value)]


_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (*get_args(Event), *get_args(Action))
}


def _step(parts: Any) -> Step:
    now, event, actions = parts
    return Step(now, _read(event), [_read(action) for action in actions])


def _read(named: Any) -> Any:
    name, body = named
    return _ADAPTERS[name].validate_python(body)
