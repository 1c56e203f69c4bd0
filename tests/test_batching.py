"""Packing of prefill batches (pure)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.batching import Budget, Chunk, Pending, Quota, pack


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


# -- the compute quota (spec §8) --


def area(cached: int, new: int) -> float:
    """Seconds of attention: one for each pair of a new token and a position before it or its own."""
    return float(new * cached + new * (new + 1) // 2)


AMPLE = Budget(tokens=1 << 20, rows=1 << 30, requests=64)


def test_requests_are_packed_whole_while_their_attention_fits_the_quota():
    """a: 4 x 64 + 10 = 266; b: 2 x 128 + 3 = 259; together 525."""
    pending = [Pending(key("a"), 64, 4), Pending(key("b"), 128, 2), Pending(key("c"), 64, 1)]
    assert [c.key[0] for c in pack(pending, AMPLE, 64, Quota(525, area))] == ["a", "b"]
    assert [c.key[0] for c in pack(pending, AMPLE, 64, Quota(524, area))] == ["a"]
    assert [c.key[0] for c in pack(pending, AMPLE, 64, Quota(525 + 65, area))] == ["a", "b", "c"]


def test_the_request_that_exceeds_the_quota_is_bisected_and_cut_at_a_block_border():
    """After a (10) there are 10 000 left: n(n + 1)/2 <= 10 000 gives n = 140, of which two blocks are whole."""
    pending = [Pending(key("a"), 0, 4), Pending(key("b"), 0, 1000), Pending(key("c"), 0, 1)]
    batch = pack(pending, AMPLE, 64, Quota(10_010, area))
    assert batch == [Chunk(key("a"), 0, 4, True), Chunk(key("b"), 0, 128, False)]


def test_a_long_context_makes_chunks_short():
    """With 6,400 cached, 64 more cost 411,680 and 128 more 827,456: the same quota, three chunks for one."""
    assert pack([Pending(key("a"), 6400, 320)], AMPLE, 64, Quota(827_455, area)) == [Chunk(key("a"), 6400, 64, False)]
    assert pack([Pending(key("a"), 6400, 320)], AMPLE, 64, Quota(827_456, area)) == [Chunk(key("a"), 6400, 128, False)]


def test_a_request_alone_advances_by_a_block_or_its_rest_whatever_the_quota():
    tiny = Quota(1e-9, area)
    assert pack([Pending(key("a"), 640, 100)], AMPLE, 64, tiny) == [Chunk(key("a"), 640, 64, False)]
    assert pack([Pending(key("a"), 640, 30), Pending(key("b"), 0, 5)], AMPLE, 64, tiny) == [
        Chunk(key("a"), 640, 30, True)
    ]


def test_the_quota_never_lifts_the_other_budgets():
    pending = [Pending(key("a"), 0, 500)]
    assert pack(pending, Budget(200, 1 << 20, 8), 64, Quota(1e12, area)) == [Chunk(key("a"), 0, 192, False)]
    assert pack(pending, Budget(63, 1 << 20, 8), 64, Quota(1e-9, area)) == []
    assert pack([Pending(key("a"), 640, 500)], Budget(512, 650, 8), 64, Quota(1e12, area)) == []


requests_of = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 3000)), min_size=1, max_size=12)


@given(requests_of, st.floats(1, 1e8))
def test_the_quota_holds_and_wastes_less_than_a_block(requests, limit_s):
    pending = [Pending(key(str(i)), blocks * 64, miss) for i, (blocks, miss) in enumerate(requests)]
    batch = pack(pending, AMPLE, 64, Quota(limit_s, area))
    total_s = sum(area(chunk.cached, chunk.new) for chunk in batch)
    alone = len(batch) == 1 and batch[0].new <= 64
    assert total_s <= limit_s or alone
    assert all(chunk.last for chunk in batch[:-1])
    assert [chunk.key for chunk in batch] == [request.key for request in pending[: len(batch)]]
    cut = 0 if batch[-1].last else batch[-1].new
    following = len(batch) if batch[-1].last else len(batch) - 1
    if following < len(pending):  # one block more of the next request, or its rest, would exceed the quota
        request = pending[following]
        more = min(request.miss, cut + 64)
        assert total_s - area(request.cached, cut) + area(request.cached, more) > limit_s


@given(requests_of, st.floats(1, 1e8))
def test_every_prompt_is_computed_once_under_a_quota(requests, limit_s):
    pending = [Pending(key(str(i)), blocks * 64, miss) for i, (blocks, miss) in enumerate(requests)]
    done = {request.key: 0 for request in pending}
    order = []
    while pending:
        for chunk in pack(pending, AMPLE, 64, Quota(limit_s, area)):
            head = next(request for request in pending if request.key == chunk.key)
            assert (chunk.cached, chunk.last) == (head.cached, chunk.new == head.miss)
            done[chunk.key] += chunk.new
            if chunk.last:
                order.append(chunk.key)
                pending.remove(head)
            else:
                pending[0] = Pending(head.key, head.cached + chunk.new, head.miss - chunk.new)
    assert done == {key(str(i)): miss for i, (_, miss) in enumerate(requests)}
    assert order == [key(str(i)) for i in range(len(requests))]
