"""The DRAM tier's bookkeeping (pure): sharing, least recently used, no slot lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.blocks.pool import SlotPool
from services.traffic_manager.tier import Tier


def keys(path: str) -> list[bytes]:
    """The block keys of a prompt: each names all of the prompt up to it."""
    return [path[: stop + 1].encode() for stop in range(len(path))]


def test_least_recently_used_goes_first():
    tier = Tier(3)
    assert tier.keep(keys("ab"), [0, 1]) == []
    assert tier.keep(keys("c"), [2]) == []
    assert tier.acquire(keys("ab")) == [0, 1]
    tier.release(keys("ab"))
    assert tier.keep(keys("d"), [3]) == [2]  # c was used less recently than a and ab
    assert tier.keep(keys("e"), [4]) == [1]  # ab goes before a, without which it is of no use
    assert tier.acquire(keys("abc")) == [0]


def test_blocks_in_use_stay_and_what_finds_no_room_is_given_back():
    tier = Tier(2)
    tier.keep(keys("ab"), [5, 6])
    assert tier.acquire(keys("ab")) == tier.acquire(keys("abx")) == [5, 6]
    assert tier.keep(keys("cd"), [7, 8]) == [7, 8]
    tier.release(keys("ab"))
    assert tier.keep(keys("cd"), [7, 8]) == [7, 8]  # the other request still uses them
    tier.release(keys("ab"))
    assert sorted(tier.keep(keys("cd"), [7, 8])) == [5, 6]


def test_a_block_read_twice_is_kept_once():
    tier = Tier(4)
    assert tier.keep(keys("ab"), [0, 1]) == []
    assert tier.keep(keys("abc"), [2, 3, 4]) == [2, 3]
    assert tier.acquire(keys("abc")) == [0, 1, 4]


def test_without_capacity_nothing_is_kept():
    tier = Tier(0)
    assert tier.keep(keys("ab"), [0, 1]) == [0, 1] and tier.acquire(keys("ab")) == []


class Requests(RuleBasedStateMachine):
    """Requests come and go over one pool and tier: 4 slots of tier, 8 for requests of at most 4 blocks each."""

    def __init__(self):
        super().__init__()
        self.tier, self.pool = Tier(4), SlotPool(12)
        self.content: dict[int, bytes] = {}  # what was read into each slot
        self.running: list[tuple[list[bytes], list[int], int]] = []

    @precondition(lambda self: len(self.running) < 2)
    @rule(path=st.text("ab", min_size=1, max_size=4))
    def stage(self, path):
        wanted = keys(path)
        slots = self.tier.acquire(wanted)
        shared = len(slots)
        assert [self.content[slot] for slot in slots] == wanted[:shared]
        own = self.pool.take(len(wanted) - shared)
        assert own is not None, "the tier has taken what belongs to requests"
        self.content.update(zip(own, wanted[shared:], strict=True))
        self.running.append((wanted, slots + own, shared))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """Its read brought all of its blocks, or only the first of them."""
        wanted, slots, shared = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        hits = data.draw(st.integers(shared, len(wanted)))
        spare = self.tier.keep(wanted[shared:hits], slots[shared:hits])
        self.tier.release(wanted[:shared])
        self.pool.give_back(spare + slots[hits:])

    @invariant()
    def whole(self):
        self.tier.check_integrity()
        self.pool.check_integrity()
        in_use = sum(len(slots) - shared for _, slots, shared in self.running)
        assert self.pool.num_used == in_use + len(self.tier)

    @invariant()
    def no_block_without_the_one_before(self):
        kept = set(self.tier._kept)
        assert all(len(key) == 1 or key[:-1] in kept for key in kept)


Requests.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase
