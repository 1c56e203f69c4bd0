"""Blocks in flight: who may send which, for how long, and who is woken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.storage_gateway import in_flight as module
from services.storage_gateway.in_flight import InFlight

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_a_block_is_one_writers_at_a_time() -> None:
    flights = InFlight(10)
    assert flights.announce("w1", [A, B, A], 0) == [True, True, False]
    assert flights.announce("w2", [B, C], 1) == [False, True]
    flights.settle("w2", [B])  # not w2's to settle
    assert B in flights
    flights.settle("w1", [B])
    assert flights.announce("w2", [B], 2) == [True]
    assert flights.held_by("w2", B) and not flights.held_by("w1", B)


def test_an_announcement_lasts_from_its_last_sign_of_life() -> None:
    flights = InFlight(10)
    flights.announce("w1", [A, B], 0)
    flights.announce("w2", [C], 5)
    flights.renew("w1", [B, C], 6)  # C is not w1's to renew
    assert flights.expire(9.9) == []
    assert flights.expire(10) == [("w1", A)]
    assert flights.expire(15.9) == [("w2", C)]
    assert flights.expire(16) == [("w1", B)]
    assert len(flights) == 0


@pytest.mark.parametrize("end", ["settle", "expire", "drop"])
def test_waiters_wake_once_however_it_ends(end: str) -> None:
    flights = InFlight(10)
    flights.announce("w", [A, B], 0)
    woken: list[str] = []

    def gone() -> None:
        woken.append("gone")

    assert flights.wait(A, lambda: woken.append("one"))
    assert flights.wait(A, lambda: woken.append("two"))
    assert flights.wait(A, gone)
    flights.forget(A, gone)
    assert flights.wait(B, lambda: woken.append("other"))
    assert not flights.wait(C, lambda: woken.append("never"))
    if end == "settle":
        flights.settle("w", [A])
        assert woken == ["one", "two"]
        flights.settle("w", [A])
    elif end == "expire":
        flights.expire(10)
    else:
        flights.drop("w")
    assert woken[:2] == ["one", "two"] and "never" not in woken and "gone" not in woken
    assert len(woken) == (2 if end == "settle" else 3)


def test_a_writer_that_leaves_takes_only_its_own() -> None:
    flights = InFlight(10)
    flights.announce("w1", [A, C], 0)
    flights.announce("w2", [B], 0)
    flights.drop("w1")
    assert [key in flights for key in (A, B, C)] == [False, True, False]


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 2)
    flights = InFlight(10)
    assert flights.announce("w", [A, B, C], 0) == [True, True, False]
    flights.settle("w", [A])
    assert flights.announce("w", [C], 0) == [True]


keys = st.lists(st.integers(0, 9).map(lambda n: bytes([n]) * 32), max_size=6)
writers = st.sampled_from(["w1", "w2", "w3"])


class Model(RuleBasedStateMachine):
    """Against a plain dictionary of key -> (writer, since)."""

    def __init__(self) -> None:
        super().__init__()
        self.flights = InFlight(5)
        self.model: dict[bytes, tuple[str, float]] = {}
        self.now = 0.0

    @rule(writer=writers, keys=keys)
    def announce(self, writer: str, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            expected.append(key not in self.model)
            self.model.setdefault(key, (writer, self.now))
        assert self.flights.announce(writer, keys, self.now) == expected

    @rule(writer=writers, keys=keys)
    def renew(self, writer: str, keys: list[bytes]) -> None:
        self.flights.renew(writer, keys, self.now)
        for key in keys:
            if self.model.get(key, ("", 0))[0] == writer:
                self.model[key] = (writer, self.now)

    @rule(writer=writers, keys=keys)
    def settle(self, writer: str, keys: list[bytes]) -> None:
        self.flights.settle(writer, keys)
        for key in keys:
            if self.model.get(key, ("", 0))[0] == writer:
                del self.model[key]

    @rule(writer=writers)
    def drop(self, writer: str) -> None:
        self.flights.drop(writer)
        self.model = {key: held for key, held in self.model.items() if held[0] != writer}

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        expired = {(writer, key) for key, (writer, since) in self.model.items() if self.now - since >= 5}
        assert set(self.flights.expire(self.now)) == expired
        self.model = {key: held for key, held in self.model.items() if (held[0], key) not in expired}

    @invariant()
    def same(self) -> None:
        assert len(self.flights) == len(self.model)
        assert all(self.flights.held_by(writer, key) for key, (writer, _) in self.model.items())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@given(keys)
def test_an_announcement_claims_each_block_once(keys: list[bytes]) -> None:
    claimed = InFlight(1).announce("w", keys, 0)
    assert sum(claimed) == len(set(keys))
