"""What `dualpath profile` found out about a model on a device: predicted times of a forward's parts, and its file.

A predicted time is a sum of non-negative terms, so it grows with each argument, as the compute quota requires (spec
§8). The attention of `new` tokens after `cached` ones costs FLOPs in proportion to cached * new and new^2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from common.errors import ConfigError
from common.perf.thresholds import Thresholds

#: How a forward is laid out over devices.
ONE_DEVICE = "one device"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a fit holds for. threads: as configured, 0 being torch's choice."""

    model_digest: str
    device: str
    dtype: str
    threads: int
    layout: str = ONE_DEVICE


@dataclass(frozen=True, slots=True)
class Predictor:
    """Seconds of a part of one request's prefill, all layers."""

    base_s: float = 0.0
    per_new_s: float = 0.0
    per_cached_new_s: float = 0.0
    per_new_squared_s: float = 0.0

    def seconds(self, cached: int, new: int) -> float:
        return (
            self.base_s
            + self.per_new_s * new
            + self.per_cached_new_s * cached * new
            + self.per_new_squared_s * new * new
        )


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error, |predicted - measured| / measured, on points that the fit had not seen."""

    median: float
    p95: float
    points: int


@dataclass(frozen=True, slots=True)
class Fitted:
    predictor: Predictor
    error: FitError


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Profile:
    """The file. linear: all but attention, of a whole forward. measured: the points, for whoever wants to look."""

    identity: Identity
    attention: Fitted
    linear: Fitted
    thresholds: Thresholds
    measured: dict[str, Any]
    format: Literal["dualpath profile 1"] = "dualpath profile 1"

    def save(self, path: Path) -> None:
        """ConfigError if the file cannot be written."""
        try:
            path.write_bytes(_PROFILE.dump_json(self, indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"profile {path}: {error.strerror}") from None


_PROFILE = TypeAdapter(Profile)


def load_profile(path: Path, identity: Identity) -> Profile:
    """ConfigError if there is no such profile, or if it is one of something else than `identity`."""
    try:
        profile = _PROFILE.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"perf.predictor {path}: {error.strerror}: make one with `dualpath profile`") from None
    except ValidationError:
        raise ConfigError(f"perf.predictor {path} is no profile: make one with `dualpath profile`") from None
    ours, theirs = asdict(identity), asdict(profile.identity)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ConfigError(
                f"perf.predictor {path} is for {name} {theirs[name]!r}, not {value!r}: run `dualpath profile` again"
            )
    return profile
