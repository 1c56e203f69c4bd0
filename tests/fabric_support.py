"""Skipping what needs shaped network namespaces where there can be none."""

from __future__ import annotations

from functools import cache

import pytest

from compose.fabric import missing

_missing = cache(missing)


def need_fabric() -> None:
    """Skip the test, saying why, unless this machine can hold a fabric."""
    if reason := _missing():
        pytest.skip(reason)
