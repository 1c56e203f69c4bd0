"""Making a directory a block store, and this model's: everything that is checked before the first block.

Blocking; called once, from a thread. Every refusal is a ConfigError of one line that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.errors import ConfigError
from common.model import Manifest

MANIFEST, BLOCKS, DRAFTS, QUARANTINE = "manifest.json", "blocks", "tmp", "quarantine"
#: What a new file system may hold already, besides hidden files.
_IGNORED = frozenset({"lost+found"})


def claim_directory(root: Path, manifest: Manifest) -> Path:
    """Make root, if need be, a store for blocks of manifest; returns its real path. Reads no block and lists none."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_writable(root)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"storage.path {root} is not a directory: give another one") from None
    except OSError as error:
        raise ConfigError(f"storage.path {root} is not writable: {error.strerror}") from None
    root = root.resolve()
    try:
        _claim(root, manifest)
        for name in (BLOCKS, DRAFTS, QUARANTINE):
            make_directory(root / name)
        for entry in os.scandir(root / BLOCKS):  # at most 256, however many blocks there are
            make_directory(Path(entry.path))
        _remove_leftovers(root / DRAFTS)
    except OSError as error:
        raise ConfigError(f"storage.path {root} cannot be used: {error}") from None
    return root


def make_directory(path: Path) -> None:
    """A private directory, there already or not. NotADirectoryError if something else, or a symbolic link, is there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory, remove it", str(path))


def create_locked(path: str, flags: int) -> int:
    """Opener of a new private file that stays locked while it is open: its writer is alive."""
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: another process's start may remove the file
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _check_writable(root: Path) -> None:
    """By doing it: permission bits do not tell what root, or anybody on a read-only mount, may do."""
    probe = root / f".probe-{secrets.token_hex(8)}"
    probe.touch(0o600, exist_ok=False)
    probe.unlink()


def _claim(root: Path, manifest: Manifest) -> None:
    path = root / MANIFEST
    if not path.exists():
        others = {name for name in os.listdir(root) if not name.startswith(".")} - _IGNORED
        if not others:
            _write_manifest(path, manifest)
        elif not path.exists():  # asked again: another first user may just have been at it
            raise ConfigError(f"storage.path {root} is neither empty nor a block store: choose another directory")
    try:
        stored = TypeAdapter(Manifest).validate_json(path.read_bytes())
    except ValidationError:
        raise ConfigError(f"storage.path: {path} is not a manifest: choose another directory") from None
    difference = stored.difference(manifest)
    if difference is not None:
        raise ConfigError(f"storage.path {root} belongs to another model ({difference}): choose another directory")


def _write_manifest(path: Path, manifest: Manifest) -> None:
    """Whole or not at all; of two first users at once one wins, and the other one compares."""
    draft = path.with_name(f".manifest-{secrets.token_hex(8)}")
    draft.touch(0o600, exist_ok=False)
    try:
        draft.write_text(json.dumps(asdict(manifest), indent=2) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _remove_leftovers(directory: Path) -> None:
    """Remove the drafts of writers that did not live to finish them."""
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile, or removed by another start
            if not _is_locked(entry.path):
                os.unlink(entry.path)


def _is_locked(path: str) -> bool:
    """Whether the file's writer is alive. Where there are no locks it counts as dead, which may cost it that block."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
