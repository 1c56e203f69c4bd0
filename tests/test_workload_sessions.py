"""Session files: what is read, what is refused (cases E17, E18: every row once and in order, or the rows named)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.workload.sessions import PACKAGED, parse_sessions, read_sessions
from common.workload.trajectories import Trajectory, Turn

FIRST = [0, 655, 20, 0.0, 1.5, "f"]


def line(name: str, *turns: list[Any], **more: Any) -> str:
    return json.dumps({"id": name, "dup": None, "turns": list(turns) or [FIRST], **more})


def test_prompt_is_a_prefix_of_the_history_plus_new_tokens() -> None:
    turn = Turn(context=675, append=40, generate=9)
    assert (turn.prompt, turn.total) == (715, 724)
    trajectory = Trajectory("t", (Turn(0, 655, 20), turn, Turn(128, 10, 1)))
    assert trajectory.peak == 724


@pytest.mark.parametrize("turn", [Turn(676, 1, 1), Turn(-1, 1, 1), Turn(10, 0, 1), Turn(10, 1, 0)])
def test_impossible_turn_is_refused(turn: Turn) -> None:
    with pytest.raises(ValueError, match="history of 675 tokens"):
        Trajectory("t", (Turn(0, 655, 20), turn))


def test_e18_all_rows_in_order_once() -> None:
    lines = [line(f"s{i}", [0, 100 + i, 5, 0.0, 1.0, "f"], [105 + i, 7, 3, 2.5, None, "a"]) for i in range(1000)]
    sessions = parse_sessions(lines, "test")
    assert [t.name for t in sessions.trajectories] == [f"s{i}" for i in range(1000)]
    assert sessions.trajectories[17].turns == (Turn(0, 117, 5), Turn(122, 7, 3, 2.5))


def test_header_line_is_kept_apart() -> None:
    sessions = parse_sessions(['{"source": "somewhere"}', line("a"), "", line("b")], "test")
    assert sessions.header == {"source": "somewhere"}
    assert len(sessions.trajectories) == 2


def test_one_of_each_fork_is_kept() -> None:
    lines = [line("a", dup="x"), line("b"), line("c", dup="x"), line("d", dup="y"), line("e", dup="x")]
    sessions = parse_sessions(lines, "test")
    assert [t.name for t in sessions.trajectories] == ["a", "b", "d"]
    assert sessions.duplicates == 2


def test_branch_to_an_older_longer_branch_keeps_the_prompt_length() -> None:
    sessions = parse_sessions([line("a", FIRST, [128, 10, 5, 1.0, 1.0, "b"], [655, 20, 5, 1.0, 1.0, "b"])], "test")
    assert sessions.trajectories[0].turns[2] == Turn(143, 20 + 655 - 143, 5, 1.0)
    assert sessions.clipped == 1


def test_no_generation_asks_for_one_token_and_unknown_think_time_is_zero() -> None:
    sessions = parse_sessions([line("a", FIRST, [675, 1, 0, None, None, "a"])], "test")
    assert sessions.trajectories[0].turns[1] == Turn(675, 1, 1, 0.0)
    assert sessions.raised == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"turns": []}', '"id" must be'),
        ('{"id": "x", "turns": []}', '"turns" must be'),
        (line("x", [0, 655, 20, 0.0, 1.5]), "turn 0: not a list of"),
        (line("x", [5, 655, 20, 0.0, 1.5, "f"]), "turn 0: exactly the first"),
        (line("x", FIRST, [0, 1, 1, 0.0, 1.5, "f"]), "turn 1: exactly the first"),
        (line("x", FIRST, [676, 1, 1, 0.0, 1.5, "a"]), "turn 1: context 676 exceeds the 675"),
        (line("x", FIRST, [675, 0, 1, 0.0, 1.5, "a"]), "turn 1: append must be"),
        (line("x", FIRST, [675, 1, -1, 0.0, 1.5, "a"]), "turn 1: gen must be"),
        (line("x", FIRST, [675, 1.5, 1, 0.0, 1.5, "a"]), "turn 1: append must be"),
        (line("x", FIRST, [675, True, 1, 0.0, 1.5, "a"]), "turn 1: append must be"),
        (line("x", FIRST, [675, 1, 1, -2, 1.5, "a"]), "turn 1: think_s must be"),
        (line("x", FIRST, [675, 1, 1, float("nan"), 1.5, "a"]), "turn 1: think_s must be"),
        (line("x", FIRST, [675, 1, 1, 0.0, 1.5, "z"]), "turn 1: kind must be"),
        (line("x", dup=3), '"dup" must be'),
        (line("a"), "appears twice"),
    ],
)
def test_e17_bad_row_is_refused_with_line_and_reason(bad: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sessions([line("a"), line("b"), bad], "file.jsonl")
    assert "file.jsonl: 1 bad rows: line 3: " in str(error.value)
    assert reason in str(error.value)


def test_every_bad_row_is_named() -> None:
    with pytest.raises(ConfigError, match=r"8 bad rows: line 2: .*; line 6: .*; and 3 more"):
        parse_sessions([line("a"), *["nothing"] * 8], "f")


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_sessions(tmp_path / "none.jsonl")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no session"):
        read_sessions(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_sessions(tmp_path / "binary")


def test_packaged_sessions_are_real_whole_and_without_forks() -> None:
    sessions = read_sessions(PACKAGED)
    assert "kv-cache-tester @94f6046d" in sessions.header["source"]
    assert sessions.header["licence"] == "Apache-2.0"
    assert len(sessions.trajectories) == 24
    assert (sessions.duplicates, sessions.clipped, sessions.raised) == (0, 0, 0)
    assert all(4 <= len(t.turns) <= 40 for t in sessions.trajectories)
    kinds = [turn[5] for row in PACKAGED.read_text().splitlines()[1:] for turn in json.loads(row)["turns"]]
    assert kinds.count("b") >= 8
