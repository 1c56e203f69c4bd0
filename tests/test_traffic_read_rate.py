"""The measured read rate of a node (pure)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.perf.read_rate import ReadRate


def test_not_known_before_a_read_has_ended():
    rate = ReadRate()
    rate.begin(1.0)
    assert rate.tokens_per_s == 0


def test_idle_time_does_not_count():
    rate = ReadRate()
    for start in (0.0, 100.0, 250.0):
        rate.begin(start)
        rate.end(500, start + 0.5)
    assert 1000 < rate.tokens_per_s < 1100  # tokens come at the end of their time, which has faded a little


def test_reads_side_by_side_count_their_time_once():
    rate = ReadRate(memory_s=1e9)
    for _ in range(4):
        rate.begin(0.0)
    for _ in range(3):
        rate.end(100, 2.0)
        assert rate.tokens_per_s == 0  # the fourth is half-way: too early to tell
    rate.end(100, 2.0)
    assert rate.tokens_per_s == pytest.approx(200)


def test_it_is_known_under_endless_load():
    rate = ReadRate(memory_s=10.0)
    rate.begin(0.0)
    for second in range(1, 60):
        rate.begin(second)
        rate.end(300, second)
    assert rate.tokens_per_s == pytest.approx(300, rel=0.1)


def test_it_follows_a_change():
    rate = ReadRate(memory_s=10.0)
    for second in range(100):
        rate.begin(second)
        rate.end(1000 if second < 50 else 100, second + 1)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.15)


def test_a_read_that_brings_nothing_makes_it_slower():
    rate = ReadRate()
    rate.begin(0.0)
    rate.end(100, 1.0)
    before = rate.tokens_per_s
    rate.begin(1.0)
    rate.end(0, 2.0)
    assert 0 < rate.tokens_per_s < before


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 5)), min_size=1), st.floats(1, 1e6))
def test_a_constant_speed_is_found_whatever_the_gaps(reads, speed):
    rate, now = ReadRate(memory_s=1e9), 0.0
    for lasts, gap in reads:
        rate.begin(now)
        now += lasts
        rate.end(round(speed * lasts * 1000), now)
        now += gap
    assert rate.tokens_per_s == pytest.approx(speed * 1000, rel=0.05)
