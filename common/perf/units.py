"""Rates as people write them."""

from __future__ import annotations

import re
from math import isfinite

from common.errors import ConfigError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_BYTES = {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "MiB/s": 2.0**20, "GiB/s": 2.0**30, "TiB/s": 2.0**40}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(\S+)\s*")


def parse_rate(option: str, text: str) -> float:
    """'400gbit' -> 50e9, '500GB/s' -> 500e9: bytes a second, above 0. ConfigError names the option. A bare 'Gb' could
    be either, and is refused."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        value, unit = float(match[1]), match[2]
        bits = _BITS.get(unit.lower().removesuffix("/s").replace("bps", "bit"))
        rate = value * bits / 8 if bits else value * _BYTES.get(unit, 0.0)
        if rate > 0 and isfinite(rate):
            return rate
    raise ConfigError(f"{option} {text!r} is not a rate above 0: write, say, 400gbit or 50GB/s")


def show_rate(rate: float) -> str:
    """Bytes a second, for people."""
    return f"{rate / 1e9:g} GB/s ({8 * rate / 1e9:g} gbit)"
