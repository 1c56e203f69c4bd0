"""What an experiment plays: sets, real sessions at native length, tool time; and what a result says of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from common.errors import ConfigError
from common.workload.gaps import GapKind, Gaps
from common.workload.hits import hits
from common.workload.synthetic import generate
from loadgen.cli import app
from loadgen.experiments.setting import Setting
from loadgen.workload.source import Source, chosen, parse_gaps


def sessions_file(directory: Path, *sessions: list[list[object]]) -> Path:
    """turns: [context, append, generate, think_s, api_s, kind]."""
    path = directory / "sessions.jsonl"
    path.write_text("".join(json.dumps({"id": f"s{i}", "turns": turns}) + "\n" for i, turns in enumerate(sessions)))
    return path


GROWING: list[list[object]] = [
    [0, 1000, 20, None, 1, "f"], [1020, 100, 20, 7.0, 1, "a"], [1140, 100, 20, 9.0, 1, "a"], [640, 50, 20, 2.5, 1, "b"],
]


def test_a_set_is_played_as_it_is() -> None:
    played = Setting().played
    assert list(played.trajectories) == generate("64K")
    assert "64K set" in Setting().describe("nowhere")["workload"]
    assert "cut" not in played.origin


def test_a_scaled_set_still_ends_at_its_maximum() -> None:
    setting = Setting(workload=Source("32K", append_scale=2.0))
    assert setting.max_length == 32_768
    assert max(trajectory.peak for trajectory in setting.played.trajectories) <= 32_768
    told = setting.describe("nowhere")
    assert told["played"]["cut_turns"] > 0
    assert f"{told['played']['cut_turns']} turns of" in told["workload"]


def test_sessions_are_native_and_cut_where_a_system_could_not_hold_them(tmp_path: Path) -> None:
    long: list[list[object]] = [[0, 90_000, 10, 0, 1, "f"], [90_010, 20_000, 10, 0, 1, "a"]]
    beyond: list[list[object]] = [[0, 150_000, 10, 0, 1, "f"]]
    setting = Setting(workload=Source(sessions=str(sessions_file(tmp_path, GROWING, long, beyond))))
    # 4 GB of device memory for a batch, 40,016 bytes a token: Basic holds 99,960 tokens of one request, whole blocks
    assert setting.limit == setting.max_length == 99_904
    assert [len(trajectory.turns) for trajectory in setting.played.trajectories] == [4, 1]
    assert setting.played.trajectories[0].turns[3].context == 640
    told = setting.played.describe()
    assert (told["cut_turns"], told["cut_sessions"], told["dropped_sessions"]) == (1, 1, 1)
    assert "2 real sessions" in setting.played.origin
    # a model that takes less device memory is cut at its own limit
    assert Setting(model="ds-27b", workload=setting.workload).limit == 163_840


def test_windows_of_sessions(tmp_path: Path) -> None:
    setting = Setting(workload=Source(sessions=str(sessions_file(tmp_path, GROWING, GROWING))), turns=2)
    windows = setting.windows(6, 0)
    assert len({window.name for window in windows}) == 6
    assert sorted(hits(window)[0] for window in windows) == [0, 0, 960, 960, 1088, 1088]
    with pytest.raises(ConfigError, match="take fewer agents or turns"):
        setting.windows(7, 0)


def test_tool_time(tmp_path: Path) -> None:
    path = sessions_file(tmp_path, GROWING)

    def thought(gaps: str) -> list[float]:
        (trajectory,) = Setting(workload=chosen(None, path, gaps)).played.trajectories
        return [turn.think_s for turn in trajectory.turns]

    assert thought("off") == [0, 0, 0, 0]
    assert thought("traced") == [0, 7.0, 9.0, 2.5]
    drawn = [
        turn.think_s for trajectory in Setting(workload=chosen("64K", None, "10,1")).played.trajectories
        for turn in trajectory.turns[1:]
    ]
    assert median(drawn) == pytest.approx(10, rel=0.05)
    assert "median 10 s" in Setting(workload=chosen(None, None, "10,1")).describe("nowhere")["workload"]


def test_gaps_are_parsed() -> None:
    assert parse_gaps("off") == Gaps()
    assert parse_gaps("2.5,0") == Gaps(GapKind.LOGNORMAL, 2.5, 0.0)
    for wrong in ("", "lognormal", "10", "10,1,2", "0,1", "-1,1", "nan,1", "10,-1", "10,1000", "1e300,1"):
        with pytest.raises(ConfigError, match="write off, traced"):
            parse_gaps(wrong)


@pytest.mark.parametrize(("arguments", "message"), [
    (["offline", "--set", "64K", "--sessions", "x"], "give one of them"),
    (["offline", "--sessions", "/no/such"], "give an existing file with --sessions"),
    (["online", "--sessions", "/no/such"], "give an existing file with --sessions"),
    (["online", "--gaps", "traced"], "synthetic trajectories have no times"),
    (["compare", "--gaps", "often"], "write off, traced"),
    (["offline", "--set", "12K"], "no trajectory set '12K'"),
    (["offline", "--set", "12K", "--time-factor", "2"], "no trajectory set '12K'"),
    (["sweep", "mal", "32K,12K"], "no trajectory set '12K'"),
])
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_burstiness_has_bounds() -> None:
    for wrong in ("0", "-1", "nan", "1e9"):
        assert CliRunner().invoke(app, ["online", "--cv", wrong]).exit_code == 2


def test_a_job_of_real_sessions_with_tool_time(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    path = sessions_file(tmp_path, GROWING, GROWING)
    done = CliRunner().invoke(app, [
        "offline", "--fabric", "1P1D", "--model", "ds-27b", "--sessions", str(path), "--gaps", "0.2,0.1",
        "--agents", "2", "--windows", "4", "--turns", "2", "--whole", "--pacing", "user", "--time-factor", "1",
        "--progress", "none", "--out", str(out),
    ])
    assert done.exit_code == 0, done.stderr
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    assert (run["turns"], run["failed"]) == (8, 0)
    assert run["validity"]["cache_warm"]["ok"]
    assert run["makespan_s"] > 2 * 0.15  # an agent plays two windows, each with a gap of about 0.2 s in it
    assert result["config"]["workload"]["sessions"] == str(path)
    assert result["config"]["workload"]["gaps"] == {"kind": "lognormal", "median_s": 0.2, "sigma": 0.1}
    assert "2 real sessions" in result["workload"]
