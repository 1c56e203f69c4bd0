"""`dualpath` with a model.profile instead of a model: nothing is fetched, token ids come and go."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.launch_harness import launched, refusal

PROFILE = {"DUALPATH_MODEL__PROFILE": "ds-660b"}


def test_a_cluster_of_a_profile_answers(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[model]\nprofile = 'ds-660b'\n")
    with launched(tmp_path / "run", "up", "--config", str(file), "--port", "0") as run:
        run.until(lambda: "/v1 (" in run.stderr)
        line = next(line for line in run.stderr.splitlines() if "/v1 (" in line)
        name, _, url = line.partition(" (")[0].partition(" at ")
        assert name == "ds-660b"
        body = {"prompt": list(range(200)), "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/completions", json={"model": name, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
        cached = run.cache / "dualpath"
        assert [path.name for path in cached.iterdir()] == ["blocks"], "no model was fetched"
        assert [path.name.rpartition("-")[0] for path in (cached / "blocks").iterdir()] == ["ds-660b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--model", "/some/model"], "--model and model.profile 'ds-660b' are both set"),
        (["demo"], "the demo needs a model"),
    ],
)
def test_a_profile_where_a_model_is_meant(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, *arguments, **PROFILE)


@pytest.mark.parametrize("role", ["frontend", "decode"])
def test_a_process_of_a_profile_needs_no_model_path(role: str, tmp_path: Path) -> None:
    nobody = {
        "DUALPATH_SCHEDULER__CONTROL": "tcp://127.0.0.1:1",
        "DUALPATH_TIMEOUTS__CALL_S": "0.3",
        "DUALPATH_TIMEOUTS__REGISTER_S": "0.5",
    }
    line = refusal(tmp_path, "serve", role, **PROFILE, **nobody)
    assert "model.path" not in line and ("no scheduler at" in line or "was not ready" in line)
