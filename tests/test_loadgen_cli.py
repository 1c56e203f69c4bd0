"""`loadgen` as a user meets it: options, output, errors, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.cli import app
from tests.loadgen_mock import MockServer, Reply, answer_well


async def loadgen(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )


async def test_replay_of_the_packaged_sessions(tmp_path: Path) -> None:
    out, transcript = tmp_path / "out.json", tmp_path / "t.jsonl"
    async with MockServer() as server:
        process = await loadgen(
            "replay", "--url", server.url, "--agents", "3", "--max-sessions", "6", "--max-turns", "4",
            "--max-context", "500", "--out", str(out), "--transcript", str(transcript), "--progress", "json",
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, stderr.decode()
    result = json.loads(out.read_text())
    assert (result["mode"], result["agents"], result["turns"], result["failed"]) == ("replay", 3, 24, 0)
    assert result["sessions"]["source"].startswith("github.com/callanjfox/kv-cache-tester")
    assert result["computed_tokens"] == result["prompt_tokens"] - result["hit_tokens"]
    assert result["scaling"]["longest_context"] <= 500
    for key in ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "jct_s"):
        assert {"p50", "p99", "mean", "n"} <= set(result[key])
    lines = [json.loads(line) for line in stderr.decode().splitlines()]
    assert [line["done"] for line in lines] == list(range(1, 25))
    assert all(line["total"] == 24 and line["failure"] is None for line in lines)
    assert len(transcript.read_text().splitlines()) == 24
    shown = stdout.decode()
    for word in ("TTFT", "TTST", "TPOT", "ITL", "JCT", "steady", "divided by", "nearest-rank"):
        assert word in shown


async def test_online(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with MockServer() as server:
        process = await loadgen(
            "online", "--url", server.url, "--aps", "20", "--duration", "0.5", "--seed", "1", "--max-turns", "2",
            "--scale", "100", "--slo-ttft", "1", "--slo-tpot", "0.5", "--out", str(out),
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, stderr.decode()
    assert stderr == b"", "no bar where there is no terminal"
    result = json.loads(out.read_text())
    assert (result["mode"], result["aps"], result["duration_s"], result["seed"]) == ("online", 20.0, 0.5, 1)
    assert result["turns"] == result["offered"] == 2 * result["arrivals"]
    assert result["goodput_rps"] > 0
    assert result["slo"] == {"ttft_s": 1.0, "tpot_s": 0.5}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_ends_at_once_and_prints_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    stuck = asyncio.Event()

    async def answer(reply: Reply) -> None:
        if len(server.bodies) <= 3:
            await answer_well(reply)
        else:
            await reply.start()
            await reply.token(0)
            stuck.set()
            await asyncio.sleep(20)

    out = tmp_path / "out.json"
    async with MockServer(answer) as server:
        process = await loadgen(
            "replay", "--url", server.url, "--agents", "1", "--max-context", "500", "--out", str(out)
        )
        await asyncio.wait_for(stuck.wait(), 20)
        asked = time.monotonic()
        process.send_signal(number)
        stdout, stderr = await asyncio.wait_for(process.communicate(), 10)
        assert time.monotonic() - asked < 3
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert "interrupted" in stdout.decode()
    result = json.loads(out.read_text())
    assert (result["turns"], result["unfinished"], result["failed"], result["interrupted"]) == (3, 1, 0, True)


async def test_nothing_ended_well(tmp_path: Path) -> None:
    async def answer(reply: Reply) -> None:
        await reply.start("500 Internal Server Error")
        await reply.raw(b'{"error": {"message": "broken"}}')
        await reply.end()

    async with MockServer(answer) as server:
        process = await loadgen("replay", "--url", server.url, "--max-sessions", "2", "--max-context", "500")
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "500: broken" in stdout.decode()
    assert stderr.decode().strip() == "error: no turn ended well"


async def test_sessions_that_do_not_fit_are_not_scaled_silently() -> None:
    async with MockServer() as server:
        process = await loadgen("replay", "--url", server.url)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert "add --max-context 4096" in stderr.decode()
    assert not server.bodies


def test_errors_are_one_line_that_names_the_fix(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    cases = {
        ("--url", "http://127.0.0.1:9"): "start the server, or correct --url",
        ("--url", "localhost"): "write, say, http://127.0.0.1:8000",
        ("--url", "http://127.0.0.1:9", "--sessions", str(tmp_path / "none")): "give an existing file with --sessions",
        ("--url", "http://127.0.0.1:9", "--sessions", str(bad)): "1 bad rows: line 1: not JSON",
        ("--url", "http://127.0.0.1:9", "--out", str(tmp_path / "no" / "out")): "no such directory",
        ("--url", "http://127.0.0.1:9", "--transcript", str(tmp_path)): "give a file in a writable directory",
    }
    for arguments, message in cases.items():
        done = CliRunner().invoke(app, ["replay", *arguments])
        assert done.exit_code == 2, arguments
        assert message in done.stderr, arguments
        assert done.stderr.startswith("error: "), arguments
        assert done.stderr.count("\n") == 1, arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "--url", "http://h", "--agents", "0"],
        ["replay", "--url", "http://h", "--scale", "0"],
        ["replay"],
        ["online", "--url", "http://h", "--aps", "nan", "--duration", "1"],
        ["online", "--url", "http://h", "--aps", "1", "--duration", "inf"],
        ["online", "--url", "http://h", "--aps", "0", "--duration", "1"],
        ["replay", "--url", "http://h", "--slo-tpot", "-1"],
        ["replay", "--url", "http://h", "--out", "/"],
    ],
)
def test_bad_options(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Error" in done.stderr
