"""Links: against closed forms, and what holds for any transfers: bytes are conserved, progress counts once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from common.perf.links import FairLink, FifoLink, through

RATE = 100.0


def ends(link: FairLink) -> dict[str, float]:
    """When each transfer ends, if no other comes."""
    found: dict[str, float] = {}
    while (now := link.next_end()) < math.inf:
        found |= dict.fromkeys(link.finished(now), now)
    return found


# -- one after the other --


def test_fifo_transfers_follow_one_another() -> None:
    link = FifoLink(RATE)
    assert link.send(2.0, 300) == 5.0
    assert link.send(3.0, 100) == 6.0  # waits for the first
    assert link.send(10.0, 50) == 10.5  # idle until then: no credit from that time
    assert link.sent == 450


def test_both_ends_of_a_transfer_are_busy_with_it() -> None:
    fast, slow = FifoLink(200.0), FifoLink(50.0)
    assert through(fast, slow, 1.0, 100) == 3.0
    assert (fast.free_at, slow.free_at) == (1.5, 3.0)
    assert through(fast, FifoLink(200.0), 1.0, 100) == 2.0
    assert fast.sent == 200


# -- all at once --


def test_one_flow_has_the_whole_rate() -> None:
    link = FairLink(RATE)
    link.start(1.0, 250, "a")
    assert ends(link) == {"a": 3.5}


@pytest.mark.parametrize("count", [2, 3, 17])
def test_equal_flows_end_together(count: int) -> None:
    link = FairLink(RATE)
    for number in range(count):
        link.start(0.0, 100, str(number))
    assert ends(link) == {str(number): approx(float(count)) for number in range(count)}


def test_flows_of_unequal_size_and_start() -> None:
    link = FairLink(RATE)
    link.start(0.0, 300, "long")
    link.start(1.0, 50, "short")  # from 1.0 on each has 50 a second
    assert ends(link) == {"short": approx(2.0), "long": approx(3.5)}  # the long one had 100, then 50, then 150 left


def test_a_flow_that_comes_later_only_delays() -> None:
    link = FairLink(RATE)
    link.start(0.0, 100, "a")
    assert link.next_end() == 1.0
    link.start(0.5, 100, "b")
    assert link.next_end() == approx(1.5)
    assert link.finished(1.0) == []  # asked early: not yet
    assert link.finished(1.5) == ["a"]


def test_classes_share_by_weight_and_flows_of_one_class_evenly() -> None:
    link = FairLink(RATE, (3.0, 1.0))
    link.start(0.0, 150, "high", 0)
    link.start(0.0, 50, "low 1", 1)
    link.start(0.0, 50, "low 2", 1)
    # 75 a second for the high one until 2 s, 12.5 for each low one; then 50 for each
    assert ends(link) == {"high": approx(2.0), "low 1": approx(2.5), "low 2": approx(2.5)}
    assert link.served(2.5, 0) == 150 and link.served(2.5, 1) == 100


def test_a_class_alone_has_the_whole_rate() -> None:
    link = FairLink(RATE, (0.999, 0.001))
    link.start(0.0, 200, "low", 1)
    assert ends(link) == {"low": 2.0}


def test_the_rate_may_change_and_stand_still() -> None:
    link = FairLink(RATE)
    link.start(0.0, 300, "a")
    link.set_rate(1.0, 50.0)
    assert link.next_end() == approx(5.0)
    link.set_rate(2.0, 0.0)
    assert link.next_end() == math.inf
    link.set_rate(10.0, 150.0)
    assert ends(link) == {"a": approx(11.0)}


FLOWS = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.001, 1000.0), st.integers(0, 1)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(FLOWS, st.lists(st.floats(0.0, 30.0), max_size=10))
def test_bytes_are_conserved_however_often_one_looks(flows: list[tuple[float, float, int]], looks: list[float]) -> None:
    """The link is busy whenever it has something, at its rate: it ends as if it had sent one after the other."""
    link, fifo = FairLink(RATE, (2.0, 1.0)), FifoLink(RATE)
    steps = sorted([(at, size, kind) for at, size, kind in flows] + [(at, 0.0, -1) for at in looks])
    ended: dict[int, float] = {}
    last = 0.0

    def run_until(now: float) -> None:
        while (due := link.next_end()) <= now:
            ended.update(dict.fromkeys(link.finished(due), due))

    for number, (now, size, kind) in enumerate(steps):
        run_until(now)
        if kind < 0:
            link.advance(now)
            continue
        link.start(now, size, number, kind)
        last = fifo.send(now, size)
    run_until(1e9)
    total = sum(size for _, size, _ in flows)
    assert len(ended) == len(flows)
    assert max(ended.values()) == approx(last, rel=1e-6, abs=1e-6)
    assert link.served(last, 0) + link.served(last, 1) == approx(total, rel=1e-9)
    for (at, size, _), number in zip(steps, range(len(steps)), strict=True):
        if number in ended:
            assert ended[number] >= at + size / RATE - 1e-6  # nobody is faster than the link


@settings(max_examples=100, deadline=None)
@given(FLOWS)
def test_no_more_than_the_rate_passes(flows: list[tuple[float, float, int]]) -> None:
    link = FairLink(RATE)
    passed = [(0.0, 0.0)]
    for now, size, _ in sorted(flows):
        while (due := link.next_end()) <= now:
            link.finished(due)
            passed.append((due, link.served(due)))
        link.start(now, size, None)
        passed.append((now, link.served(now)))
    for (before, had), (after, has) in pairwise(passed):
        assert -1e-6 <= has - had <= RATE * (after - before) + 1e-6
