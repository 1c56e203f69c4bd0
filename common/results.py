"""Where a result goes: known before anything runs for it."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError


def check_result_file(out: Path | None) -> None:
    """ConfigError if there is no directory for it. None: no file is asked for."""
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"result file {out}: no such directory: create {out.parent} first")
