"""What the tests of the doctor share."""

from __future__ import annotations

from common.config import Config, load_config
from services.launcher.doctor.check import Level

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


def configured(**fields: object) -> Config:
    """A configuration with these fields, a__b for a.b."""
    return load_config(None, {name.replace("__", "."): value for name, value in fields.items()})
