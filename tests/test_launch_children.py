"""Child processes: what they are given, what they say, how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.children import Child, end_all
from common.rundir import RunDirectory
from services.launcher.tools import ToolError, run_tool

SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); {SLEEP}"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""


def python(code: str, first_line: str = "") -> Child:
    return Child("test", [sys.executable, "-c", code], first_line=first_line)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def eventually(holds: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_line_in_and_lines_out() -> None:
    child = python("import sys; print(sys.stdin.readline().upper()); print('', flush=True)", first_line="hello\n")
    assert [await child.readline() for _ in range(3)] == ["HELLO", "", ""]
    assert await child.readline() is None
    assert await child.ended() == 0
    child.kill()


async def test_descriptors_come_back() -> None:
    async def life() -> None:
        child = python(SLEEP)
        await end_all([child], 5)
        assert await child.ended() == -signal.SIGTERM

    await life()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await life()
    await asyncio.sleep(0)  # transports close a step later
    assert len(os.listdir("/proc/self/fd")) == before


async def test_who_ignores_sigterm_is_killed() -> None:
    child = python(STUBBORN)
    assert await child.readline() == "set"
    await end_all([child], 0.2)
    assert await child.ended() == -signal.SIGKILL


async def test_cancelled_grace_kills_at_once() -> None:
    child = python(STUBBORN)
    assert await child.readline() == "set"
    ending = asyncio.create_task(end_all([child], 60))
    await asyncio.sleep(0.1)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert child.exited.result() == -signal.SIGKILL


async def test_a_dead_leader_takes_its_children_along() -> None:
    child = python(PARENT)
    grandchild = int(await child.readline() or 0)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.ended() == -signal.SIGKILL
    await eventually(lambda: gone(grandchild))
    child.kill()


async def test_a_program_that_cannot_be_started() -> None:
    with pytest.raises(FileNotFoundError):
        Child("test", ["/no/such/program"])


async def test_tool_output_and_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, "import sys; print('out'); print('error: no luck', file=sys.stderr); sys.exit(3)")
    seen: list[str] = []
    with pytest.raises(ToolError, match=r"^no luck$") as raised:
        await run_tool("some_tool", on_line=seen.append)
    assert raised.value.status == 3
    assert sorted(seen) == sorted(raised.value.output) == ["error: no luck", "out"]


async def test_a_cancelled_tool_is_gone_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, PARENT)
    pids: list[int] = []
    running = asyncio.create_task(run_tool("some_tool", on_line=lambda line: pids.append(int(line))))
    await eventually(lambda: pids)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: gone(pids[0]))


async def test_a_tool_ends_with_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, PARENT)
    run = "asyncio.run(run_tool('some_tool', on_line=lambda line: print(line, flush=True)))"
    parent = python(f"import asyncio; from services.launcher.tools import run_tool; {run}")
    grandchild = int(await parent.readline() or 0)
    os.kill(parent.pid, signal.SIGKILL)
    await eventually(lambda: gone(grandchild))
    parent.kill()


def tool(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (directory / "some_tool.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory) + os.pathsep + str(Path(__file__).parent.parent))


def test_run_directory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RunDirectory() as run:
        (run.path / "some.log").write_text("text")
    assert os.listdir(tmp_path) == []


def test_kept_run_directory_has_its_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RunDirectory() as run:
        (run.path / "some.log").write_text("text")
        (run.path / "blocks").mkdir()
        assert run.keep() == run.path
    assert os.listdir(run.path) == ["some.log"]


def test_run_directory_needs_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/place")
    with pytest.raises(Exception, match="set TMPDIR"), RunDirectory():
        pass
