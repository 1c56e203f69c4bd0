"""The oracle's transcript check: as strict as a greedy run, at one forward a distinct history."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.engine.torch_backend.reference import Reference, Turn, check_transcript, main, plan_forwards
from tests.engine_harness import random_tokens
from tests.models import EOS_ID, tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory, threads=1)


@pytest.fixture(scope="module")
def session(reference: Reference) -> list[Turn]:
    """Three turns, each with the ones before in its prompt."""
    turns: list[Turn] = []
    history: list[int] = []
    for number, (append, generate) in enumerate([(40, 20), (7, 9), (100, 1)]):
        prompt = history + random_tokens(append, seed=number)
        turns.append(Turn("a", number, prompt, reference.greedy(prompt, generate)))
        history = prompt + turns[-1].output
    return turns


def write(path: Path, turns: list[Turn]) -> Path:
    path.write_text("".join(json.dumps(vars_of(turn)) + "\n" for turn in turns))
    return path


def vars_of(turn: Turn) -> dict[str, object]:
    return {"session": turn.session, "turn": turn.turn, "prompt": turn.prompt, "output": turn.output}


def test_a_session_takes_one_forward(session: list[Turn]) -> None:
    other = Turn("b", 0, random_tokens(30, seed=9), [5, 6])
    again = [Turn("c", turn.turn, turn.prompt, turn.output) for turn in session]
    forwards = plan_forwards([*session, other, *again])
    assert [len(forward.turns) for forward in forwards] == [6, 1]
    assert forwards[0].tokens == session[-1].context


def test_a_greedy_transcript_is_equal(directory: Path, session: list[Turn], tmp_path: Path) -> None:
    progress: list[dict[str, int]] = []
    report = check_transcript(directory, write(tmp_path / "t", session), threads=1, progress=progress.append)
    assert (report.turns, report.equal, report.mismatches) == (3, 3, [])
    assert progress == [{"forward": 1, "forwards": 1, "tokens": 176, "turns": 3, "mismatches": 0}]


def test_a_wrong_token_is_found_where_it_is(
    directory: Path, reference: Reference, session: list[Turn], tmp_path: Path
) -> None:
    wrong = list(session[1].output)
    wrong[4] = (wrong[4] + 1) % 512
    turns = [session[0], Turn("a", 1, session[1].prompt, wrong)]
    report = check_transcript(directory, write(tmp_path / "t", turns), threads=1)
    (mismatch,) = report.mismatches
    assert (report.turns, report.equal) == (2, 1)
    assert (mismatch.turn, mismatch.index, mismatch.expected, mismatch.got) == (1, 4, session[1].output[4], wrong[4])
    logits = reference.logits(session[1].prompt + wrong[:4])[-1]
    assert mismatch.gap == pytest.approx(float(logits.max() - logits[wrong[4]]), abs=1e-3)
    assert mismatch.gap > 0


def test_long_outputs_are_checked_to_the_end(directory: Path, reference: Reference, tmp_path: Path) -> None:
    prompt = random_tokens(3)
    output = reference.greedy(prompt, 600)
    assert check_transcript(directory, write(tmp_path / "t", [Turn("a", 0, prompt, output)]), threads=1).equal == 1
    output[599] = (output[599] + 1) % 512
    report = check_transcript(directory, write(tmp_path / "t", [Turn("a", 0, prompt, output)]), threads=1)
    assert [mismatch.index for mismatch in report.mismatches] == [599]


def test_greedy_stops_at_the_end_token(reference: Reference) -> None:
    output = reference.greedy([5, 6, 7], 400)
    assert len(output) == 400
    end = output[30]
    assert reference.greedy([5, 6, 7], 400, {end, EOS_ID})[-1] in {end, EOS_ID}


def test_command_line(
    directory: Path,
    session: list[Turn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transcript = write(tmp_path / "t", session)
    arguments = ["--model", str(directory), "--transcript", str(transcript), "--progress", "json", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["reference", *arguments])
    main()
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"turns": 3, "equal": 3, "mismatches": []}
    assert json.loads(printed.err.splitlines()[-1])["forwards"] == 1

    transcript.write_text('{"session": "a", "turn": 0, "prompt": [], "output": [1]}\n')
    with pytest.raises(SystemExit, match="line 1: a turn needs a prompt"):
        main()
    transcript.write_text('{"session": "a", "turn": 0, "prompt": [-1], "output": [1]}\n')
    with pytest.raises(SystemExit, match="line 1: not a turn"):
        main()
