"""The fabrics of this machine, each a private directory: its state, its control keys, and a lock that its owner holds.

Whoever holds the lock lives. So a fabric without a holder is what a killed run has left, unless it was made to be kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path

from common.errors import ConfigError
from compose.fabric.layout import MAX_FABRICS, Layout

DIRECTORY = Path("/run/dualpath-fabric")


class Holder(Enum):
    """NOBODY: it was made to be kept. DEAD: of whoever made it, or was making it."""

    NOBODY = "nobody"
    ALIVE = "alive"
    DEAD = "dead"


def directory(name: str) -> Path:
    return DIRECTORY / name


@contextmanager
def exclusive() -> Iterator[None]:
    """One process at a time makes or removes fabrics. ConfigError if the directory cannot be made."""
    try:
        DIRECTORY.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(DIRECTORY / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{DIRECTORY}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def names() -> list[str]:
    """Of all fabrics, whoever owns them."""
    return sorted(entry.name for entry in DIRECTORY.glob("*") if entry.is_dir())


def free_slot() -> int:
    """The least that no fabric has; MAX_FABRICS if all are taken. Call inside exclusive()."""
    taken = {layout.slot for layout in map(load, names()) if layout is not None}
    return next((slot for slot in range(MAX_FABRICS) if slot not in taken), MAX_FABRICS)


def create(layout: Layout, keep: bool) -> int | None:
    """Record a fabric; the lock's descriptor, which is its ownership until it is closed, or None for one that is kept.
    ConfigError if somebody has one of this name. Call inside exclusive()."""
    path = directory(layout.name)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(f"fabric {layout.name} is in use: choose another name") from None
    owner = None
    if not keep:
        owner = os.open(path / "owner", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
    (path / "layout.json").write_text(json.dumps(asdict(layout)))
    return owner


def load(name: str) -> Layout | None:
    """None if there is no such fabric, or its record is not whole."""
    try:
        return Layout(**json.loads((directory(name) / "layout.json").read_text()))
    except (OSError, ValueError, TypeError, ConfigError):
        return None


def holder(name: str) -> Holder:
    """Whose a fabric is. Call inside exclusive()."""
    try:
        lock = os.open(directory(name) / "owner", os.O_RDWR)
    except FileNotFoundError:
        return Holder.DEAD if load(name) is None else Holder.NOBODY
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Holder.ALIVE
    finally:
        os.close(lock)
    return Holder.DEAD


def remove(name: str) -> None:
    shutil.rmtree(directory(name), ignore_errors=True)
