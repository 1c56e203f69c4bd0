"""Real processes, started by hand in any order, told to end by signals: exit statuses, and what clients see of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from common.types import Role
from tests.launch_harness import Launched, launched

SERVED = [role.value for role in Role if role is not Role.TRAFFIC_MANAGER]
#: What an orderly end may take on a machine that has other things to do.
END_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def environment(directory: Path, control: int, port: int = 0) -> dict[str, str]:
    return {
        "DUALPATH_MODEL__PROFILE": "ds-27b",
        "DUALPATH_PERF__TIME_FACTOR": "0.1",
        "DUALPATH_STORAGE__PATH": str(directory / "blocks"),
        "DUALPATH_SCHEDULER__CONTROL": f"tcp://127.0.0.1:{control}",
        "DUALPATH_FRONTEND__PORT": str(port),
        "DUALPATH_LOG__FORMAT": "json",
        "DUALPATH_TIMEOUTS__ENGINES_S": "100",  # an engine may take long to start where others have the cores
    }


def events(run: Launched) -> list[dict[str, str]]:
    """What it has logged so far."""
    return [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{") and line.endswith("}")]


def said(run: Launched, event: str, **facts: str) -> dict[str, str] | None:
    """The first such event of its log."""
    return next((each for each in events(run) if each["event"] == event and facts.items() <= each.items()), None)


def end(run: Launched, *numbers: int) -> int:
    """The exit status after these signals; nothing stays behind."""
    for number in numbers:
        os.kill(run.process.pid, number)
    status = run.wait(END_S)
    assert run.left_behind(seconds=10) == ({}, [])
    return status


@pytest.mark.parametrize("role", SERVED)
def test_a_process_without_peers_says_for_whom_it_waits_and_ends_when_told_to(role: str, tmp_path: Path) -> None:
    """D12: no scheduler, nobody; alive all the same."""
    with launched(tmp_path, "serve", role, **environment(tmp_path, free_port())) as run:
        if role == "scheduler":
            run.until(lambda: said(run, "started"))
            assert httpx.get(said(run, "started")["health"] + "/ready", timeout=10).status_code == 200  # type: ignore[index]
        else:  # an engine's traffic manager waits before it
            run.until(lambda: said(run, "waiting for the scheduler"))
        assert end(run, signal.SIGTERM) == 0
        assert not run.error_lines and "Traceback" not in run.stderr


class Stream(threading.Thread):
    """A client in the middle of a long answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.error = ""
        self._url = url
        self.start()

    def run(self) -> None:
        body = {"prompt": [5] * 100, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.begun.set()
                    if '"error"' in line:
                        self.error = line
        except httpx.HTTPError as error:
            self.error = str(error)
        self.begun.set()


class Cluster:
    """Processes by role; each can be ended and started again."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._environment = environment(directory, free_port(), self.port)
        self._stack = stack
        self._count = 0
        self.runs: dict[str, Launched] = {}

    def start(self, role: str) -> None:
        self._count += 1
        directory = self._directory / f"{role}-{self._count}"
        arguments = ("serve", role, "--name", role)
        self.runs[role] = self._stack.enter_context(launched(directory, *arguments, **self._environment))

    def ready(self, role: str) -> None:
        run = self.runs[role]
        run.until(lambda: said(run, "started", process=role), seconds=120)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Started front end first, scheduler last."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        for role in reversed(SERVED):
            cluster.start(role)
        for role in SERVED:
            cluster.ready(role)
        yield cluster


@pytest.mark.timeout(600)
def test_a_rolling_restart_by_signals(cluster: Cluster) -> None:
    """Every process but the front end, the only one of its role each, under load: each exits 0 and comes back."""
    stop, answers, failed = threading.Event(), [], []

    def ask() -> None:
        body = {"prompt": list(range(130)), "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        while not stop.is_set():
            response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
            good = response.status_code == 200 and len(response.json()["choices"][0]["token_ids"]) == 20
            (answers if good else failed).append(response.text)

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for role in ("scheduler", "prefill", "decode", "storage-gateway"):
            before = len(answers)
            assert end(cluster.runs[role], signal.SIGTERM) == 0, cluster.runs[role].stderr
            cluster.start(role)
            cluster.ready(role)
            cluster.runs[role].until(lambda before=before: len(answers) > before + 3, seconds=120)
    finally:
        stop.set()
        for client in clients:
            client.join(150)
    assert not failed and len(answers) > 12
    draining = Stream(cluster.url)
    assert draining.begun.wait(60) and not draining.error
    frontend = cluster.runs["frontend"]
    os.kill(frontend.process.pid, signal.SIGTERM)
    frontend.until(lambda: said(frontend, "draining"))
    assert httpx.get(f"{cluster.url}/health", timeout=10).status_code == 503
    os.kill(frontend.process.pid, signal.SIGTERM)  # a second signal ends it at once
    assert frontend.wait(END_S) == 1
    draining.join(30)
    assert draining.error
