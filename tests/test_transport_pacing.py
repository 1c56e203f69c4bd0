"""Sharing of a paced wire: worked examples, and what holds for whatever is asked of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.transport.pacing import CATCH_UP_S, LOW_SHARE, Pacer, Piece

RATE = 1024.0
HIGH, KV, LOW = 0, 1, 2


def asked(pacer: Pacer, priority: int, num_bytes: int = 128, since: float = 0.0) -> Piece:
    piece = Piece(num_bytes, priority)
    pacer.ask(piece, since)
    return piece


# ---- worked examples: 1,024 bytes a second, so that 128 bytes have the wire for 1/8 s ----


def test_pieces_go_one_after_the_other_and_the_higher_class_first() -> None:
    pacer = Pacer(RATE, 3)
    assert pacer.due_at is None and pacer.grant(0.0) == []
    low, first, second = (asked(pacer, priority) for priority in (LOW, KV, KV))
    assert pacer.grant(0.0) == [first] and first.start == 0.0
    high = asked(pacer, HIGH, since=0.05)
    assert pacer.grant(0.12) == [] and pacer.due_at == 0.125
    assert pacer.grant(0.125) == [high]
    assert pacer.grant(0.25) == [second]
    assert pacer.grant(0.375) == [low] and low.start == 0.375
    assert pacer.due_at is None


def test_a_late_grant_starts_when_it_was_due() -> None:
    pacer = Pacer(RATE, 3)
    pieces = [asked(pacer, KV) for _ in range(3)]
    pacer.grant(0.0)
    pacer.grant(0.129)
    pacer.grant(0.25)
    assert [piece.start for piece in pieces] == [0.0, 0.125, 0.25]


def test_a_very_late_grant_makes_up_for_a_few_milliseconds_only() -> None:
    pacer = Pacer(RATE, 3)
    pieces = [asked(pacer, KV, num_bytes=1) for _ in range(100)]
    assert pacer.grant(0.0) == pieces[:1]
    # from 20 ms before 1.0 on, one each 1/1024 s: those that start by 1.0, not a second's worth
    assert pacer.grant(1.0) == pieces[1:22]
    assert [piece.start for piece in pieces[1:22]] == pytest.approx([0.98 + n / 1024 for n in range(21)])


def test_an_idle_wire_has_no_credit() -> None:
    pacer = Pacer(RATE, 3)
    asked(pacer, KV)
    pacer.grant(0.0)
    later = [asked(pacer, KV, since=7.0) for _ in range(5)]
    assert pacer.grant(7.0) == later[:1]
    assert later[0].start == 7.0 and pacer.due_at == 7.125


def test_a_piece_that_has_been_ready_all_the_time_loses_nothing_by_asking_late() -> None:
    """The next piece of a job that is woken 3 ms after its last one has left the wire."""
    pacer = Pacer(RATE, 3)
    first = asked(pacer, KV)
    pacer.grant(0.0)
    assert first.start == 0.0
    following = asked(pacer, KV, since=first.start)
    assert pacer.grant(0.128) == [following] and following.start == 0.125


def test_a_withdrawn_piece_takes_no_time() -> None:
    pacer = Pacer(RATE, 3)
    gone, stays = asked(pacer, HIGH), asked(pacer, KV)
    pacer.withdraw(gone)
    assert pacer.grant(0.0) == [stays]
    pacer.withdraw(stays)  # has had the wire
    assert pacer.due_at is None
    last = asked(pacer, KV)
    assert pacer.grant(0.125) == [last]


def test_a_waiting_low_class_gets_a_thousandth() -> None:
    """A piece of the low class goes after 1,000 of the high one, each time."""
    pacer = Pacer(RATE, 3)
    for _ in range(3):
        asked(pacer, LOW)
    asked(pacer, HIGH)
    order, now = [], 0.0
    while order.count(LOW) < 2:
        (piece,) = pacer.grant(now)
        order.append(piece.priority)
        if piece.priority == HIGH:
            asked(pacer, HIGH)
        now += 0.125
    assert [index for index, priority in enumerate(order) if priority == LOW] == [1000, 2001]


# ---- properties ----


@dataclass
class Ask:
    at: float
    num_bytes: int
    priority: int


asks = st.lists(
    st.builds(Ask, at=st.floats(0, 3), num_bytes=st.integers(1, 400), priority=st.integers(0, 2)),
    min_size=1,
    max_size=40,
).map(lambda found: sorted(found, key=lambda ask: ask.at))


def serve(pending: list[Ask], lateness: list[float]) -> list[tuple[float, Piece]]:
    """All pieces with the time of their grant, by a caller whose timers are late by this and that."""
    pacer, granted, now = Pacer(RATE, 3), [], 0.0
    pending = list(pending)
    for turn in range(10_000):
        due_at = pacer.due_at
        wake_at = math.inf if due_at is None else max(now, due_at + lateness[turn % len(lateness)])
        if not pending and due_at is None:
            return granted
        if pending and pending[0].at <= wake_at:
            ask = pending.pop(0)
            now = max(now, ask.at)
            pacer.ask(Piece(ask.num_bytes, ask.priority), ask.at)
        else:
            now = wake_at
        granted += [(now, piece) for piece in pacer.grant(now)]
    raise AssertionError("not done")


@given(asks, st.lists(st.floats(0, 0.1), min_size=1, max_size=8))
def test_never_more_than_the_rate_and_a_bounded_burst(pending: list[Ask], lateness: list[float]) -> None:
    granted = serve(pending, lateness)
    assert len(granted) == len(pending)
    for first, (begin, _) in enumerate(granted):
        total = 0
        for end, piece in granted[first:]:
            assert total <= RATE * (end - begin + CATCH_UP_S) + 1e-6
            total += piece.num_bytes


@example(
    [Ask(2.0, 126, 2), Ask(2.0, 1, 2), Ask(2.125, 400, 2)],  # the last comes while the one before is only granted late
    [0.015625],
)
@given(asks, st.lists(st.floats(0, CATCH_UP_S), min_size=1, max_size=8))
def test_the_wire_is_never_idle_while_anybody_waits(pending: list[Ask], lateness: list[float]) -> None:
    """It ends no later than a wire that takes bytes as they come, in whatever order: lateness within bounds is no loss.
    Nor does it end earlier by more than is made up for: what comes while another piece is granted late follows that."""
    free_at = 0.0
    for ask in pending:
        free_at = max(free_at, ask.at) + ask.num_bytes / RATE
    granted = [piece for _, piece in serve(pending, lateness)]
    assert granted[-1].start is not None
    end = granted[-1].start + granted[-1].num_bytes / RATE
    assert free_at - CATCH_UP_S - 1e-6 <= end <= free_at + 1e-6


@given(asks)
def test_within_a_class_it_is_first_come_first_served(pending: list[Ask]) -> None:
    granted = [piece for _, piece in serve(pending, [0.0])]
    for priority in range(3):
        assert [piece.num_bytes for piece in granted if piece.priority == priority] == [
            ask.num_bytes for ask in pending if ask.priority == priority
        ]


@settings(deadline=None)
@given(
    low_bytes=st.integers(1, 50),
    high_bytes=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    priorities=st.sampled_from([(HIGH, LOW), (HIGH, KV), (KV, LOW)]),
)
def test_nobody_starves(low_bytes: int, high_bytes: list[int], priorities: tuple[int, int]) -> None:
    """However much of a higher class comes, a piece goes once 1 / LOW_SHARE times its bytes have passed."""
    pacer = Pacer(RATE, 3)
    high, low = priorities
    waiting = asked(pacer, low, low_bytes)
    passed, turn, now = 0, 0, 0.0
    while waiting.start is None:
        size = high_bytes[turn % len(high_bytes)]
        turn += 1
        asked(pacer, high, size)
        passed += sum(piece.num_bytes for piece in pacer.grant(now) if piece is not waiting)
        now = pacer.due_at if pacer.due_at is not None else now
    assert passed <= low_bytes / LOW_SHARE + 2 * max(high_bytes)
