"""How sessions are fitted: native or cut; divided only when told to, and then it says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.workload.scaling import DEMO, Selection, cut, fit, scale_to, scaled, stretched
from common.workload.sessions import PACKAGED, read_sessions
from common.workload.trajectories import Trajectory, Turn

LONG = Trajectory("long", (Turn(0, 600, 20), Turn(620, 300, 80, 3.0), Turn(128, 40, 2), Turn(170, 10, 10)))
SHORT = Trajectory("short", (Turn(0, 30, 5), Turn(35, 3, 1)))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns: list[Turn] = []
    history = 0
    for _ in range(draw(st.integers(1, 12))):
        context = draw(st.one_of(st.just(history), st.integers(0, history)))
        turns.append(Turn(context, draw(st.integers(1, 9000)), draw(st.integers(1, 900)), draw(st.floats(0, 9))))
        history = turns[-1].total
    return Trajectory("any", tuple(turns))


def test_native_lengths_are_kept_when_they_fit() -> None:
    workload = fit([LONG, SHORT], Selection(), limit=1000)
    assert workload.trajectories == (LONG, SHORT)
    described = workload.describe()
    assert described["factors"] == {"long": 1, "short": 1}
    assert described["cut_turns"] == described["cut_sessions"] == described["dropped_sessions"] == 0
    assert (described["turns"], described["append_tokens"], described["generate_tokens"]) == (6, 983, 118)


def test_session_is_cut_at_the_limit_and_the_cut_is_counted() -> None:
    workload = fit([LONG, SHORT], Selection(), limit=999)
    assert workload.trajectories[0].turns == LONG.turns[:1], "what follows a cut turn has no history"
    assert (workload.cut_sessions, workload.cut_turns, workload.dropped_sessions) == (1, 3, 0)


def test_session_whose_first_turn_does_not_fit_is_dropped() -> None:
    workload = fit([LONG, SHORT], Selection(), limit=619)
    assert workload.trajectories == (SHORT,)
    assert workload.dropped_sessions == 1


def test_no_session_fits_says_how_to_make_it() -> None:
    with pytest.raises(ConfigError, match=r"none of the 2 sessions.*limit of 34 .*has 35.*--max-context 34"):
        fit([LONG, SHORT], Selection(), limit=34)


def test_scale_divides_every_length_but_no_time() -> None:
    workload = fit([LONG], Selection(scale=10), limit=None)
    assert workload.trajectories[0].turns == (Turn(0, 60, 2), Turn(62, 30, 8, 3.0), Turn(13, 4, 1), Turn(18, 1, 1))
    assert workload.describe()["factors"] == {"long": 10}
    assert workload.describe()["scale"] == 10


def test_each_session_gets_its_own_factor() -> None:
    workload = fit([LONG, SHORT], Selection(max_context=100), limit=4096)
    assert workload.factors == (10, 1)
    assert workload.describe()["max_context"] == 100


@given(trajectories(), st.integers(30, 20_000))
def test_scaled_to_a_context_fits_it(trajectory: Trajectory, max_context: int) -> None:
    factor = scale_to(trajectory, max_context)
    small = scaled(trajectory, factor)
    assert small.peak <= max_context
    assert (factor == 1) == (trajectory.peak <= max_context)
    assert len(small.turns) == len(trajectory.turns)
    native = history = 0
    for before, after in zip(trajectory.turns, small.turns, strict=True):
        assert (after.append, after.generate) == (max(1, before.append // factor), max(1, before.generate // factor))
        assert after.think_s == before.think_s
        if before.context == native:
            assert after.context == history, "a whole history stays whole"
        elif native:
            assert abs(after.context / history - before.context / native) <= 0.5 / history + 1e-9
        native, history = before.total, after.total


@given(trajectories(), st.integers(1, 20_000))
def test_cut_keeps_the_longest_start_that_fits(trajectory: Trajectory, limit: int) -> None:
    kept = cut(trajectory, limit).turns
    assert all(turn.total <= limit for turn in kept)
    assert kept == trajectory.turns[: len(kept)]
    assert len(kept) == len(trajectory.turns) or trajectory.turns[len(kept)].total > limit


def test_more_turns_than_tokens_cannot_fit() -> None:
    many = Trajectory("many", tuple(Turn(2 * i, 1, 1) for i in range(60)))
    with pytest.raises(ConfigError, match="60 turns, which need a context of at least 120"):
        fit([many], Selection(max_context=100), limit=4096)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        fit([SHORT], Selection(scale=2, max_context=100), limit=4096)
    with pytest.raises(ConfigError, match="--max-context 5000 exceeds the model's limit of 4096"):
        fit([SHORT], Selection(max_context=5000), limit=4096)


def test_selection_takes_the_first_sessions_and_turns() -> None:
    workload = fit([LONG, SHORT, LONG], Selection(max_sessions=2, max_turns=1), limit=None)
    assert [t.turns for t in workload.trajectories] == [LONG.turns[:1], SHORT.turns[:1]]
    assert workload.cut_turns == 0, "turns that were not asked for are not cuts"


def test_demo_is_small_and_has_a_fall_back() -> None:
    workload = fit(read_sessions(PACKAGED).trajectories, DEMO, limit=8192)
    described = workload.describe()
    assert (described["sessions"], described["turns"]) == (4, 20)
    assert described["longest_context"] <= 900
    assert described["generate_tokens"] <= 250
    assert described["prompt_tokens"] > 3 * described["append_tokens"]
    fallbacks = [
        1
        for trajectory in workload.trajectories
        for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False)
        if after.context < before.total - 64
    ]
    assert fallbacks == [1]


def test_sweeps_multiply_appends_and_generations_apart() -> None:
    workload = fit([LONG], Selection(append_factor=1.5, generate_factor=0.25), limit=None)
    # Contexts: none, all of 905, as much of 1375 tokens of history as 128 are of 1000, all of 237.
    turns = (Turn(0, 900, 5), Turn(905, 450, 20, 3.0), Turn(176, 60, 1), Turn(237, 15, 2))
    assert workload.trajectories[0].turns == turns
    described = workload.describe()
    assert (described["append_factor"], described["generate_factor"]) == (1.5, 0.25)
    assert described["append_tokens"] == 900 + 450 + 60 + 15


@given(trajectories(), st.floats(0.1, 4), st.floats(0.1, 4))
def test_stretched_keeps_whole_histories_whole(trajectory: Trajectory, append: float, generate: float) -> None:
    sized = stretched(trajectory, append, generate)
    native = history = 0
    for before, after in zip(trajectory.turns, sized.turns, strict=True):
        assert (after.context == history) >= (before.context == native)
        assert after.append == max(1, round(before.append * append))
        assert after.generate == max(1, round(before.generate * generate))
        native, history = before.total, after.total


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_no_such_factor(factor: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        stretched(SHORT, factor, 1.0)
    with pytest.raises(ValueError, match="must be above 0"):
        stretched(SHORT, 1.0, factor)


@pytest.mark.parametrize(("limit", "max_length"), [(None, 999), (999, None), (999, 5000), (5000, 999)])
def test_the_lesser_of_mal_and_limit_cuts(limit: int | None, max_length: int | None) -> None:
    workload = fit([LONG, SHORT], Selection(max_length=max_length), limit)
    assert [len(t.turns) for t in workload.trajectories] == [1, 2]
    assert (workload.cut_sessions, workload.cut_turns) == (1, 3)
    assert workload.describe()["max_length"] == max_length
