"""A Ctrl-C in the very moment in which a process is started: it may end the child before that has its own session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch_harness import REPOSITORY

UNDER_SIGNALS = """
import asyncio, os, signal, sys, threading, time
from common.children import Child
from common.rundir import RunDirectory

os.setsid()
signal.signal(signal.SIGINT, lambda *_: None)

def hammer():
    while True:
        os.killpg(0, signal.SIGINT)
        time.sleep(0.0002)

async def main():
    died_early = 0
    for _ in range(40):
        child = Child("child", [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"])
        await asyncio.sleep(0.01)
        died_early += not child.alive
        child.kill()
        assert await child.ended() in (-signal.SIGINT, -signal.SIGKILL)
        with RunDirectory() as run:
            path = run.path
        assert not path.exists()
    print(died_early)

threading.Thread(target=hammer, daemon=True).start()
asyncio.run(main())
"""


def test_a_child_that_dies_before_it_leads_a_session(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_SIGNALS],
        check=False,
        cwd=REPOSITORY,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # the moment was hit
