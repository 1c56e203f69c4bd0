"""A bounded memory of what has gone."""

from __future__ import annotations

from common.latest import Latest


def test_the_oldest_is_forgotten_first():
    latest = Latest(3)
    for name in ("a", "b", "c", "a", "d"):
        latest.add(name)
    assert [name in latest for name in "abcd"] == [True, False, True, True] and len(latest) == 3


def test_what_is_there_again_has_not_gone():
    latest = Latest(2)
    latest.add("a")
    latest.discard("a")
    latest.discard("never there")
    assert "a" not in latest and not len(latest)
