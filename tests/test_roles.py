"""Roles of nodes that follow the load, decided on a plant that is as simple as its arithmetic."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import Role
from services.scheduler.policy import NodeLoad, RoleController, RolesConfig, SwitchRole, View
from services.scheduler.policy.roles import Side, gain

CONFIG = RolesConfig(switch_s=6.0)
PREFILL, DECODE = Role.PREFILL, Role.DECODE


@dataclass
class Plant:
    """Nodes that serve as many requests a second as the scarcer side can, or as are offered; prefill_s, decode_s:
    node-seconds that a request takes on each side. A node that switches is away for its drain and switch_s."""

    prefill: int
    decode: int
    prefill_s: float = 1.0
    decode_s: float = 1.0
    offered: float = 1e9
    noise: float = 0.0
    seed: int = 0
    config: RolesConfig = CONFIG
    now: float = 0.0
    started: float = 0.0
    served: float = 0.0
    switches: list[tuple[float, SwitchRole]] = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.controller = RoleController(self.config)
        names = [f"n{i}" for i in range(self.prefill + self.decode)]
        self.roles = {name: PREFILL if i < self.prefill else DECODE for i, name in enumerate(names)}
        self.away: dict[str, tuple[float, Role]] = {}

    def count(self, role):
        return sum(its is role for its in self.roles.values())

    @property
    def rate(self):
        return min(self.offered, self.count(PREFILL) / self.prefill_s, self.count(DECODE) / self.decode_s)

    def view(self):
        busy = {
            PREFILL: self.rate * self.prefill_s / max(self.count(PREFILL), 1),
            DECODE: self.rate * self.decode_s / max(self.count(DECODE), 1),
        }
        nodes = [
            NodeLoad(name, role, min(max(busy[role] + self.rng.uniform(-1, 1) * self.noise, 0), 1), 0.0, 0.0, 2, 10, 10)
            for name, role in self.roles.items()
        ]
        return View(tuple(nodes), int(self.started))

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now += self.config.period_s
            self.started += self.rate * self.config.period_s
            self.served += self.rate * self.config.period_s
            for name, (back, role) in list(self.away.items()):
                if self.now >= back:
                    del self.away[name]
                    self.roles[name] = role
            waiting = bool(self.away)
            decided = self.controller.decide(self.view(), self.now)
            assert not (waiting and decided), "one at a time"
            assert len(decided) <= max(1, (self.prefill + self.decode) // 4)
            for switch in decided:
                lost = self.controller.regret if switch.to is PREFILL else -self.controller.regret
                assert lost >= self.config.switch_s, "it has not cost as much as the switch will"
                self.switches.append((self.now, switch))
                assert self.roles.pop(switch.node) is not switch.to
                self.away[switch.node] = (self.now + self.config.switch_s + 3.0, switch.to)
                least = min(self.config.least, self.prefill, self.decode)
                assert min(self.count(PREFILL), self.count(DECODE)) >= least, "the last of a role"
        return self


def best(plant):
    total = plant.prefill + plant.decode
    return max(min(p / plant.prefill_s, (total - p) / plant.decode_s) for p in range(1, total))


# -- worked by hand --


@pytest.mark.parametrize(
    ("nodes", "used", "others", "others_used", "expected"),
    [
        (1, 1.0, 5, 0.2, 1.0),  # a second node doubles what one serves: one node's worth; 4 * (1 / 0.8) is no bound
        (2, 1.0, 4, 0.5, 1.0),  # 3/2 of now against 3/4 / 0.5 = 3/2: all of it
        (2, 1.0, 4, 0.6, 0.5),  # 3/2 against 0.75 / 0.6 = 5/4: half of it
        (2, 1.0, 4, 0.75, 0.0),  # the others could not spare one: 0.75 / 0.75
        (2, 0.95, 2, 0.9, 0.0),
        (2, 0.85, 4, 0.1, 0.0),  # nobody waits for it
        (2, 1.0, 1, 0.0, 0.0),  # never the last one
        (3, 1.0, 2, 0.0, 1.0),  # idle others
    ],
)
def test_gain_of_one_node_more(nodes, used, others, others_used, expected):
    assert gain(Side(nodes, used), Side(others, others_used), CONFIG) == pytest.approx(expected)


def test_several_nodes_go_at_once_if_each_is_worth_most_of_one():
    """4P12D, decode nodes have the work of 4.8 of them: with 7 prefill nodes, 7/4 of now against 9/4.8 = 1.875; with 8,
    2 against 8/4.8 = 1.67, less than before. A quarter of 16 nodes may go at once."""
    side, other = Side(4, 1.0), Side(12, 0.4)
    assert [gain(side, other, CONFIG, count) for count in (1, 2, 3, 4)] == pytest.approx([1.0, 2.0, 3.0, 8 / 3])
    assert Plant(4, 12, prefill_s=1.0, decode_s=1.2).run(28).count(DECODE) == 12 - 3


def test_a_switch_is_made_when_its_lack_has_cost_as_much():
    """2P4D, prefill twice as scarce: a node's worth is lost each second. The switch costs 6 s, and 6 s more, which a
    request stays: 12 in hand at 2 a second. It is made 12 s, and what is forgotten of them, after the first window."""
    plant = Plant(2, 4, prefill_s=1.0, decode_s=1.0).run(60)
    first, switch = plant.switches[0]
    assert switch.to is PREFILL
    assert first == pytest.approx(CONFIG.settle_s + 12.3, abs=1.0)
    assert plant.run(600).count(PREFILL) == 3
    assert len(plant.switches) == 1


def test_a_costly_switch_is_made_later():
    """A node's worth is lost each second and forgotten within 300: after t, 300 (1 - exp(-t / 300)) is felt. 11 node-
    seconds (5, and the stay's 6) are felt after 11.2 s, 56 after 61.9 s."""
    times = [Plant(2, 4, config=RolesConfig(switch_s=cost)).run(600).switches[0][0] for cost in (5.0, 50.0)]
    assert times[1] - times[0] == pytest.approx(50.7, abs=1.0)
    forgotten = RolesConfig(switch_s=400.0)  # more than is ever remembered at a node's worth a second
    assert not Plant(2, 4, config=forgotten).run(3600).switches


@pytest.mark.parametrize(("promised", "staged"), [(0.6, 0.0), (0.0, 1.0)])
def test_prefill_that_is_all_used_does_not_count_what_waits_for_it_as_use_of_decode_nodes(promised, staged):
    def first(prefill_used):
        controller = RoleController(CONFIG)
        nodes = [NodeLoad(f"p{i}", PREFILL, prefill_used, 0.0, 0.0, 9, 1, 1) for i in range(2)]
        nodes += [NodeLoad(f"d{i}", DECODE, 0.4, promised, staged, 9, 1, 1) for i in range(4)]
        for second in range(60):
            if decided := controller.decide(View(tuple(nodes), 10 * second), float(second)):
                return decided[0].to
        return None

    assert first(1.0) is PREFILL
    assert first(0.4) is DECODE  # there they need it
    assert first(0.93) is None  # in between: 0.7 of it counts, and no side could spare a node


def test_the_node_with_least_to_finish_goes_if_another_one_is_as_large():
    controller = RoleController(CONFIG)
    decode = [
        NodeLoad("large", DECODE, 0.1, 0.0, 0.0, 0, 20, 10),
        NodeLoad("busy", DECODE, 0.1, 0.0, 0.0, 9, 10, 10),
        NodeLoad("idle", DECODE, 0.1, 0.0, 0.0, 1, 10, 10),
    ]
    prefill = [NodeLoad("p", PREFILL, 1.0, 0.0, 0.0, 9, 1, 1)]
    decided = [controller.decide(View((*prefill, *decode), 10 * s), float(s)) for s in range(60)]
    assert [action for actions in decided for action in actions] == [SwitchRole("idle", PREFILL)]


def test_a_node_that_does_not_come_back_is_given_up():
    plant = Plant(2, 5)
    plant.run(28)
    (lost,) = plant.away
    plant.away.clear()
    plant.run(60)
    assert plant.controller.switching == (SwitchRole(lost, PREFILL),)
    plant.run(120)
    assert len(plant.switches) == 2 and plant.switches[1][1].node != lost


def test_going_back_and_forth_becomes_dearer_each_time():
    """A plant on which the arithmetic is always wrong: whichever side has just got a node seems to need it less than
    the other one. If each switch cost the same, two hours would see 300."""
    controller, at, prefill = RoleController(CONFIG), [], 3
    for second in range(7200):
        used = (1.0, 0.3) if prefill == 3 else (0.3, 1.0)
        roles = [PREFILL] * prefill + [DECODE] * (6 - prefill)
        nodes = [NodeLoad(f"n{i}", role, used[role is DECODE], 0.0, 0.0, 1, 1, 1) for i, role in enumerate(roles)]
        if controller.decide(View(tuple(nodes), 10 * second), float(second)):
            at.append(second)
            prefill = 7 - prefill
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert min(gaps[4:]) > 4 * gaps[0]
    assert len(at) < 7200 / 150


def test_nodes_of_one_side_only_decide_nothing():
    controller = RoleController(CONFIG)
    nodes = tuple(NodeLoad(f"p{i}", PREFILL, 1.0, 0.0, 0.0, 1, 1, 1) for i in range(3))
    assert not [a for s in range(100) for a in controller.decide(View(nodes, s), float(s))]
    assert not [a for s in range(100) for a in controller.decide(View((), 0), 100.0 + s)]


# -- whatever the load --

work = st.floats(0.05, 20.0)
sizes = st.integers(1, 12)


@settings(max_examples=30, deadline=None)
@given(prefill=sizes, decode=sizes, prefill_s=work, decode_s=work, noise=st.floats(0, 0.05), seed=st.integers(0, 99))
def test_a_constant_load_leads_to_the_best_ratio_and_rest(prefill, decode, prefill_s, decode_s, noise, seed):
    plant = Plant(prefill, decode, prefill_s, decode_s, noise=noise, seed=seed).run(1500)
    towards = {switch.to for _, switch in plant.switches}
    assert len(towards) <= 1, "back and forth"
    before = len(plant.switches)
    assert plant.run(1800).switches[before:] == []
    assert not plant.away
    assert plant.rate >= 0.85 * best(plant)  # a step may be worth less than its cost, or less than can be told


@settings(max_examples=30, deadline=None)
@given(prefill=sizes, decode=sizes, shares=st.tuples(st.floats(0.01, 0.85), st.floats(0.01, 0.85)),
       noise=st.floats(0, 0.3), seed=st.integers(0, 99))  # fmt: skip
def test_a_load_that_both_sides_can_bear_changes_nothing(prefill, decode, shares, noise, seed):
    """Constant load at up to 85 % of what either side can serve, for 30 minutes (case C19)."""
    plant = Plant(prefill, decode, prefill * shares[0], decode * shares[1], offered=1.0, noise=noise, seed=seed)
    assert plant.run(1800).switches == []


phases = st.lists(st.tuples(work, work, st.floats(1, 300), st.floats(0.1, 50)), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(prefill=sizes, decode=sizes, loads=phases, noise=st.floats(0, 0.5), switch_s=st.floats(0, 60),
       least=st.integers(1, 4))  # fmt: skip
def test_never_the_last_of_a_role_one_at_a_time_and_not_before_its_time_is_over(
    prefill, decode, loads, noise, switch_s, least
):
    plant = Plant(prefill, decode, noise=noise, config=RolesConfig(switch_s, least))
    for plant.prefill_s, plant.decode_s, seconds, plant.offered in loads:
        plant.run(seconds)  # asserts the first two
    last: dict[str, float] = {}
    for at, switch in plant.switches:
        assert at - last.get(switch.node, -1e9) >= switch_s + CONFIG.dwell_s
        last[switch.node] = at


@settings(max_examples=40, deadline=None)
@given(total=st.integers(4, 12), seed=st.integers(0, 9), phase_s=st.floats(300, 900), factor=st.floats(2, 8))
def test_phases_that_last_are_served_better_than_by_any_fixed_ratio_or_nearly_as_well(total, seed, phase_s, factor):
    """Prefill-heavy, then decode-heavy, by the same factor."""
    phases = [(factor, 1.0), (1.0, factor)]
    start = total // 2
    plant = Plant(start, total - start, seed=seed)
    for plant.prefill_s, plant.decode_s in phases:
        plant.run(phase_s)
    fixed = max(sum(phase_s * min(p / a, (total - p) / b) for a, b in phases) for p in range(1, total))
    assert plant.served >= (1.1 if factor >= 4 and total >= 6 and phase_s >= 400 else 0.93) * fixed


@settings(max_examples=15, deadline=None)
@given(loads=phases, noise=st.floats(0, 0.3), seed=st.integers(0, 99))
def test_the_same_views_at_the_same_times_are_decided_alike(loads, noise, seed):
    def run():
        plant = Plant(3, 3, noise=noise, seed=seed)
        for plant.prefill_s, plant.decode_s, seconds, plant.offered in loads:
            plant.run(seconds)
        return plant.switches

    assert run() == run()
