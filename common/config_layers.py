"""Where configuration values come from: a TOML file, the environment above it, flags above both; and where an error has
its place. Knows nothing of the fields."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from common.errors import ConfigError

ENV_PREFIX = "DUALPATH_"
DEFAULT = "default"

Name = tuple[str, ...]
"""A field, section by section; an element of a list has its number there."""


@dataclass(slots=True)
class Layers:
    """values: of all layers together, nested. places: who set each of them last, in words."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Name, str] = field(default_factory=dict)

    def put(self, name: Name, value: object, place: str) -> None:
        """A value from a higher layer. ConfigError where a lower one has a value in place of a section."""
        section = self.values
        for part in name[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{'.'.join(name)}: {part} is a value, not a section ({place})")
        section[name[-1]] = value
        self.places = {other: known for other, known in self.places.items() if other[: len(name)] != name}
        self.places[name] = place

    def origin(self, name: Name) -> str:
        """Who set this field, or the first thing in it."""
        return next((place for other, place in self.places.items() if other[: len(name)] == name), DEFAULT)

    def place(self, name: Name) -> str:
        """Where to look for what is wrong with it: its origin, or that of what it is in."""
        around = (self.origin(name[:length]) for length in range(len(name), 0, -1))
        return next((place for place in around if place != DEFAULT), DEFAULT)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the field (dotted; "configuration" if it is several), what, and who set it."""

    field: str
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.field}: {self.what}" + (f" ({self.place})" if self.place != DEFAULT else "")


def parse_settings(settings: Iterable[str]) -> dict[str, object]:
    """Overrides out of FIELD=VALUE, as flags give them. ConfigError for anything else."""
    overrides: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name):
            raise ConfigError(f"--set {setting}: write SECTION.FIELD=VALUE")
        overrides[name] = value
    return overrides


def read_layers(file: Path | None, overrides: Mapping[str, object]) -> Layers:
    """The file, then the environment, then overrides by dotted name (None: not given). ConfigError if the file cannot
    be read, or is not TOML."""
    layers = Layers()
    if file is not None:
        try:
            text = file.read_text()
            layers.values = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"configuration file {file}: {reason}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"configuration file {file} is not TOML: {error}") from None
        layers.places = {name: f"{file}, line {line}" for name, line in locate(text).items()}
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            name = tuple(variable.removeprefix(ENV_PREFIX).lower().split("__"))
            layers.put(name, value, f"environment variable {variable}")
    for dotted, override in overrides.items():
        if override is not None:
            layers.put(tuple(dotted.split(".")), override, "command line")
    return layers


def locate(text: str) -> dict[Name, int]:
    """The line of every value in a TOML document, from 1: the first one up to which it is a document that has it."""
    lines, begins = text.splitlines(keepends=True), 1
    found: dict[Name, int] = {}
    for count in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a value of several lines
        for name in _leaves(values):
            found.setdefault(name, begins)
        begins = count + 1
    return found


def _leaves(value: object, name: Name = ()) -> Iterator[Name]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*name, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*name, str(index)))
    else:
        yield name


def problems(error: ValidationError, layers: Layers, root: type[BaseModel]) -> list[Problem]:
    """Everything that is wrong, in the order of the fields."""
    return [_problem(detail["loc"], detail["type"], detail["msg"], layers, root) for detail in error.errors()]


def _problem(
    location: tuple[int | str, ...], kind: str, message: str, layers: Layers, root: type[BaseModel]
) -> Problem:
    name = tuple(str(part) for part in location)
    if kind == "extra_forbidden":
        return Problem(".".join(name), "no such field" + _hint(name, root), layers.place(name))
    what = message.removeprefix("Value error, ")
    if name:
        return Problem(".".join(name), what, layers.place(name))
    # several fields do not go together: the message names them
    named = [tuple(dotted.split(".")) for dotted in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", what)]
    places = dict.fromkeys(layers.place(other) for other in named if other in layers.places)
    return Problem("configuration", what, "; ".join(places) or DEFAULT)


def _hint(name: Name, root: type[BaseModel]) -> str:
    """Which field may have been meant."""
    section: Any = root
    for part in name[:-1]:
        section = getattr(section.model_fields.get(part), "annotation", None)
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
    close = difflib.get_close_matches(name[-1], section.model_fields, 1)
    return f"; did you mean {'.'.join((*name[:-1], *close))}?" if close else ""
