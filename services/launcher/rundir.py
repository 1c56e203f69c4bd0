"""The directory of one run (logs, a demo's blocks): gone when the run is, however the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REMOVE_WHEN_ALONE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
REMOVE_WAIT_S = 60.0


class RunDirectory:
    """A context: entering makes a temporary directory, leaving removes it.

    A janitor process removes it once nobody holds the write end of a pipe any more. This process holds it, and so does
    every child that is started with pass_fds=run.held: if all of them are killed the directory still goes.
    """

    def __enter__(self) -> RunDirectory:
        self.path = Path(tempfile.mkdtemp(prefix="dualpath-"))
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
        """Leave the directory behind for people to look at."""
        self._janitor.kill()
        return self.path

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._janitor.wait(REMOVE_WAIT_S)
