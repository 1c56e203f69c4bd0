"""Packing of prefill batches (pure)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.batching import Budget, Chunk, Pending, pack


def key(name: str) -> tuple[str, int]:
    return (name, 0)


def test_fifo_and_whole_requests_while_they_fit():
    batch = pack([Pending(key("a"), 64, 10), Pending(key("b"), 0, 20)], Budget(100, 1000, 8), 64)
    assert batch == [Chunk(key("a"), 64, 10, True), Chunk(key("b"), 0, 20, True)]


def test_the_last_request_is_cut_at_a_block_border():
    batch = pack([Pending(key("a"), 0, 50), Pending(key("b"), 0, 500)], Budget(200, 1000, 8), 64)
    assert batch == [Chunk(key("a"), 0, 50, True), Chunk(key("b"), 0, 128, False)]


def test_tail_shorter_than_a_block_is_never_dropped():
    """A34: every token of the prompt is computed, the last chunk takes the tail whatever its length."""
    for length in (2048, 2049, 2111, 2112):
        done = 0
        while done < length:
            (chunk,) = pack([Pending(key("a"), done, length - done)], Budget(2048, 10_000, 8), 64)
            done += chunk.new
            assert chunk.last == (done == length)
            assert chunk.last or done % 64 == 0
        assert done == length


def test_nothing_overtakes_a_request_that_does_not_fit():
    assert pack([Pending(key("a"), 640, 64), Pending(key("b"), 0, 1)], Budget(512, 650, 8), 64) == []


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 600)), max_size=12),
    st.integers(64, 600),
    st.integers(700, 3000),
    st.integers(1, 8),
)
def test_budgets_hold(requests, tokens, rows, count):
    pending = [Pending(key(str(i)), blocks * 64, miss) for i, (blocks, miss) in enumerate(requests)]
    batch = pack(pending, Budget(tokens, rows, count), 64)
    assert sum(chunk.new for chunk in batch) <= tokens
    assert sum(chunk.cached + chunk.new for chunk in batch) <= rows
    assert len(batch) <= count
    assert [chunk.key for chunk in batch] == [request.key for request in pending[: len(batch)]]
    assert all(chunk.last for chunk in batch[:-1])
    assert all(chunk.new > 0 for chunk in batch)
