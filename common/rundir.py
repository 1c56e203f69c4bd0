"""The directory of one run (logs, a demo's blocks): gone when the run is, however the run ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import ConfigError

REMOVE_WHEN_ALONE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
REMOVE_WAIT_S = 60.0


class RunDirectory:
    """A context: entering makes a temporary directory, leaving removes it.

    A janitor process removes it once nobody holds the write end of a pipe any more. This process holds it, and so does
    every child that is started with pass_fds=run.held: if all of them are killed the directory still goes.

    parent: where to make it; by default where temporary files go.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent

    def __enter__(self) -> RunDirectory:
        try:
            self.path = Path(tempfile.mkdtemp(prefix="dualpath-", dir=self._parent))
        except OSError as error:
            raise ConfigError(f"no temporary directory: {error}; set TMPDIR") from None
        self._kept = False
        read, self._write = os.pipe()
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", REMOVE_WHEN_ALONE, str(self.path)], stdin=read, start_new_session=True
        )
        os.close(read)
        return self

    @property
    def held(self) -> tuple[int]:
        """File descriptors to pass to children that use the directory."""
        return (self._write,)

    def keep(self) -> Path:
        """Leave the files (logs, results) behind for people to look at; directories go all the same."""
        self._janitor.kill()
        self._kept = True
        return self.path

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._janitor.wait(REMOVE_WAIT_S)
        if self._kept:
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
        else:  # a Ctrl-C may have ended the janitor between its fork and its own session
            shutil.rmtree(self.path, ignore_errors=True)
