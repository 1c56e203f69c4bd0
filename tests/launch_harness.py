"""Running `dualpath` as a user does: a process of its own, signals from outside, and what it leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parent.parent
MARK = "LAUNCH_TEST_MARK"
SMALL = {
    "DUALPATH_SCHEDULER__CONTROL": "tcp://127.0.0.1:*",
    "DUALPATH_STORAGE__STAGING": "4MiB",
    "DUALPATH_PREFILL__DEVICE_MEMORY": "4MiB",
    "DUALPATH_PREFILL__BUFFER": "8MiB",
    "DUALPATH_DECODE__DEVICE_MEMORY": "8MiB",
    "DUALPATH_DECODE__BUFFER": "8MiB",
    "DUALPATH_TIMEOUTS__DRAIN_S": "3",
    "DUALPATH_TIMEOUTS__LOOKUP_S": "2",
}


class Launched:
    """One run of the command line in a session of its own. Everything that it starts carries the same mark."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.mark = secrets.token_hex(8)
        self.temporary, self.cache = directory / "tmp", directory / "cache"
        for needed in (self.temporary, self.cache):
            needed.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        own = {MARK: self.mark, "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(self.cache)}
        paths = {"PYTHONPATH": str(REPOSITORY)}
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=directory,
                env={**os.environ, **paths, **SMALL, **own, **environment},
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def processes(self) -> dict[int, str]:
        """Everything alive that carries the mark: pid -> command line."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, words: str) -> int:
        """The pid of the one process whose command line has these words."""
        found = [pid for pid, command in self.processes().items() if words in command]
        assert len(found) == 1, (words, self.processes())
        return found[0]

    def interrupt(self) -> None:
        """A Ctrl-C at the terminal: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def until(self, holds: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait for something while the command runs."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"ended with {self.process.poll()}: {self.stderr}"
            assert time.monotonic() < deadline, f"not in {seconds:g} s: {self.stderr}\n{self.processes()}"
            time.sleep(0.05)

    def left_behind(self, seconds: float = 10.0) -> tuple[dict[int, str], list[str]]:
        """Processes and temporary files that are still there after so many seconds, none of which should be."""
        deadline = time.monotonic() + seconds
        while True:
            left = self.processes(), sorted(os.listdir(self.temporary))
            if left == ({}, []) or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


@contextmanager
def launched(directory: Path, *arguments: str, **environment: str) -> Iterator[Launched]:
    """Launched, killed in the end with all that it started."""
    run = Launched(directory, *arguments, **environment)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)


def refusal(directory: Path, *arguments: str, **environment: str) -> str:
    """The one error line of a command that must fail and leave nothing."""
    with launched(directory, *arguments, **environment) as run:
        assert run.wait(60) == 2, run.stderr
        assert run.left_behind() == ({}, [])
        assert len(run.error_lines) == 1, run.stderr
        assert "Traceback" not in run.stderr
        return run.error_lines[0]
