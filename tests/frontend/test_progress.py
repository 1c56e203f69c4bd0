"""Tokens in order over attempts, whatever order and number they arrive in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.progress import Progress


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_any_order_with_duplicates_gives_the_sequence_once(order: list[int], duplicates: list[int]) -> None:
    progress: Progress[int] = Progress(8)
    progress.finish(8)
    released: list[int] = []
    for index in [*order, *duplicates]:
        released += progress.add(index, 100 + index)
    assert released == list(range(100, 108))
    assert progress.count == 8 and progress.complete and not progress.gap


def test_a_missing_token_is_a_gap_until_it_comes() -> None:
    progress: Progress[int] = Progress(4)
    assert progress.add(1, 11) == []
    assert progress.gap and not progress.complete
    assert progress.add(0, 10) == [10, 11]
    assert not progress.gap


def test_fewer_or_more_tokens_than_the_engine_says_is_a_gap() -> None:
    for total in (1, 3):
        progress: Progress[int] = Progress(4)
        progress.add(0, 10)
        progress.add(1, 11)
        progress.finish(total)
        assert progress.gap and not progress.complete


def test_a_duplicate_never_changes_a_token() -> None:
    progress: Progress[int] = Progress(4)
    progress.add(1, 11)
    progress.add(1, 99)
    assert progress.add(0, 10) == [10, 11]
    assert progress.add(0, 99) == []


def test_an_index_beyond_the_output_is_ignored() -> None:
    progress: Progress[int] = Progress(2)
    assert progress.add(2, 12) == []
    assert not progress.gap


def test_a_new_attempt_forgets_what_came_out_of_order() -> None:
    progress: Progress[int] = Progress(4)
    progress.add(0, 10)
    progress.add(2, 12)
    progress.finish(4)
    progress.restart()
    assert progress.count == 1
    assert not progress.gap
    assert progress.add(1, 21) == [21]
