"""The configuration for people: what holds and where each value comes from, or everything that is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from common.config import Config
from common.config_layers import ENV_PREFIX, Layers, Name, Problem, problems, read_layers
from common.errors import ConfigError
from common.model import read_configured_model
from common.rpc import read_key_pair


def check(
    file: Path | None, overrides: Mapping[str, object] | None = None
) -> tuple[Config | None, Layers, list[Problem]]:
    """The configuration, unless there are problems. ConfigError if the file cannot be read at all."""
    layers = read_layers(file, overrides or {})
    try:
        config = Config.model_validate(layers.values)
    except ValidationError as error:
        return None, layers, problems(error, layers, Config)
    found = [*_misspelt_variables(), *_beyond_values(config, layers)]
    return (None if found else config), layers, found


def _misspelt_variables() -> Iterator[Problem]:
    """Variables that look like a field's, but for the two underscores between section and field: nobody reads them."""
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or "__" in name:
            continue
        for section, info in Config.model_fields.items():
            fields = getattr(info.annotation, "model_fields", {})
            if name.removeprefix(f"{section}_") in fields and name.startswith(f"{section}_"):
                meant = f"{ENV_PREFIX}{section}__{name.removeprefix(f'{section}_')}".upper()
                yield Problem(variable, f"is not read: write {meant}", "environment")


def _beyond_values(config: Config, layers: Layers) -> Iterator[Problem]:
    """What only shows when the values are used."""
    if config.model.profile:
        try:
            read_configured_model(config)
        except ConfigError as error:
            yield _of(str(error), ("model", "profile"), layers)
    if config.security.curve_dir:
        try:
            read_key_pair(config.security.curve_dir)
        except ConfigError as error:
            yield _of(str(error), ("security", "curve_dir"), layers)


def _of(message: str, name: Name, layers: Layers) -> Problem:
    dotted = ".".join(name)
    return Problem(dotted, message.removeprefix(f"{dotted}: "), layers.place(name))


def effective(config: Config, layers: Layers) -> list[str]:
    """Every value with where it comes from, as lines of a TOML file that says the same."""
    return [*_section(config, (), layers)]


def _section(section: BaseModel, name: Name, layers: Layers) -> Iterator[str]:
    inner = []
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            inner.append((key, value))
            continue
        text = _toml(value)
        line = f"# {key} is not set" if text is None else f"{key} = {text}"
        yield f"{line:<44} # {layers.origin((*name, key))}"
    for key, value in inner:
        path = (*name, key)
        yield ""
        yield f"[{'.'.join(path)}]"
        yield from _section(value, path, layers)


def _toml(value: object) -> str | None:
    """JSON of plain values is TOML too, but for null and objects."""
    if value is None:
        return None
    if isinstance(value, list):
        return "[" + ", ".join(_table(element) for element in value) + "]"
    return json.dumps(value)


def _table(element: object) -> str:
    if not isinstance(element, BaseModel):
        return json.dumps(element)
    pairs = element.model_dump(exclude_none=True).items()
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in pairs) + " }"
