"""The constants of verbs, by their names in C: versions of pyverbs keep them in different places."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def constants() -> Any:
    """An object with IBV_... attributes. ImportError without pyverbs."""
    try:
        from pyverbs import enums as module
    except ImportError:
        from pyverbs import libibverbs_enums as module
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, IntEnum):
            found.update({member: int(number) for member, number in value.__members__.items()})
        elif isinstance(value, int):
            found[name] = int(value)
    return SimpleNamespace(**found)
