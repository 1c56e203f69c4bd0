"""Bad input to `dualpath`: one clear line, exit status not 0, nothing left behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.model import read_model_directory
from common.storage.claim import claim_directory
from tests.launch_harness import launched, refusal
from tests.models import tiny_model


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _unknown_architecture(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without("config.json"), "has no config.json"),
        (_without("tokenizer.json"), "has no tokenizer.json"),
        (_without("model.safetensors"), "has no weights (*.safetensors)"),
        (_unknown_architecture, "names no supported architecture: one of LlamaForCausalLM"),
    ],
)
def test_an_unusable_model_directory(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    spoil(directory)
    line = refusal(tmp_path / "run", "up", "--model", str(directory))
    assert str(directory) in line and words in line


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, command, "--model", "/no/such/model")
    assert line == "error: model directory /no/such/model does not exist: give a directory or a hub id with --model"


def test_weights_that_cannot_be_loaded_keep_the_logs(model: Path, tmp_path: Path) -> None:
    broken = tiny_model(tmp_path)
    (broken / "model.safetensors").write_bytes(b"not tensors")
    with launched(tmp_path / "run", "up", "--model", str(broken), "--port", "0") as run:
        assert run.wait(90) != 0
        processes, kept = run.left_behind(seconds=1)
        assert processes == {}
        if kept:  # no error line of its own: the log's end is shown, and the whole of it is there to read
            logs = run.temporary / kept[0]
            assert str(logs) in run.error_lines[0]
            assert any((logs / f"{name}.log").stat().st_size for name in ("prefill-0", "decode-0"))
        assert len(run.error_lines) == 1


@pytest.mark.parametrize("role", ["frontend", "scheduler"])
def test_a_port_in_use(role: str, model: Path, taken_port: int, tmp_path: Path) -> None:
    arguments = ["up", "--model", str(model), "--port", str(taken_port if role == "frontend" else 0)]
    control = {"DUALPATH_SCHEDULER__CONTROL": f"tcp://127.0.0.1:{taken_port}"} if role == "scheduler" else {}
    line = refusal(tmp_path, *arguments, **control)
    assert line.startswith(f"error: {role}: cannot listen on") and str(taken_port) in line


def test_a_block_directory_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocks = str(tmp_path / "file" / "blocks")
    line = refusal(tmp_path / "run", "up", "--model", str(model), "--port", "0", DUALPATH_STORAGE__PATH=blocks)
    assert line.startswith("error: storage-gateway: ") and blocks in line


def test_a_block_directory_of_another_model(model: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path, seed=1)
    claim_directory(tmp_path / "blocks", read_model_directory(other, "float32", 64).manifest)
    blocks = str(tmp_path / "blocks")
    line = refusal(tmp_path / "run", "up", "--model", str(model), "--port", "0", DUALPATH_STORAGE__PATH=blocks)
    assert line.startswith("error: storage-gateway: ") and "belongs to another model" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[scheduler", "is not TOML"),
        ("[scheduler]\nread_side = 'both'", "scheduler.read_side"),
        ("[log]\nlevel = 'loud'", "log.level"),
        ("[network]\nhost = '192.0.2.1'", "security.curve_dir"),
        ("[storage]\nwhere = '/x'", "storage.where"),
    ],
)
def test_a_bad_configuration(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert words in refusal(tmp_path / "serve", "serve", "scheduler", "--config", str(file))


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.toml" in refusal(tmp_path, "up", "--config", "nowhere.toml")


def test_serve_without_a_model(tmp_path: Path) -> None:
    assert "model.path is not set" in refusal(tmp_path, "serve", "prefill")


def test_sessions_that_are_not_there(model: Path, tmp_path: Path) -> None:
    line = refusal(tmp_path, "demo", "--model", str(model), "--sessions", "nowhere.jsonl")
    assert "nowhere.jsonl" in line


def test_results_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    line = refusal(tmp_path, "demo", "--model", str(model), "--out", "nowhere/results.json")
    assert "nowhere" in line


def test_status_without_a_cluster(tmp_path: Path) -> None:
    nobody = {"DUALPATH_SCHEDULER__CONTROL": "tcp://127.0.0.1:1", "DUALPATH_TIMEOUTS__CALL_S": "0.3"}
    assert "tcp://127.0.0.1:1 did not answer" in refusal(tmp_path, "status", **nobody)


def test_a_hit_ratio_that_is_no_number(tmp_path: Path) -> None:
    with launched(tmp_path, "profile", "--out", "profile.json", "--hit-ratio", "nan") as run:
        assert run.wait(60) == 2
        assert "--hit-ratio" in run.stderr
        assert run.processes() == {}, "refused before anything is measured"
