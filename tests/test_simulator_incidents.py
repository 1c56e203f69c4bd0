"""Engines that fail, slow down or join, foreign traffic, roles that change: what they cost; nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from common.config import TimeoutsConfig
from common.errors import ConfigError
from common.perf.bounds import Turn as MeanTurn
from common.types import Role
from common.workload.phases import phased
from common.workload.trajectories import Trajectory, Turn
from loadgen.simulator import Cluster, Scenario, offline, simulate
from loadgen.simulator.incidents import Failure, Foreign, Join, Slow, SlowNics, parse_incidents
from loadgen.simulator.roles import AdaptiveRoles, least_nodes, reload_s
from loadgen.simulator.run import Simulation
from loadgen.workload.load import Offline
from loadgen.workload.source import Source
from services.scheduler.policy import RoleController, SwitchRole, check_integrity

MEAN = MeanTurn(32_426, 285, 104)
SMALL = Cluster(2, 3, engines=2)
NOTICED_S = TimeoutsConfig().heartbeat_timeout_s
KV, SNIC = 40_016, 50e9 / 8


def without_cost(result: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in result.items() if name != "simulator"})


class Counted(Simulation):
    """With an account of its own of the tokens that attempts have made, by turn."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.made: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        lost, ended = self.agents.lost, self.agents.ended

        def count_lost(request, code):
            self.made[request.key[0]] = self.made.get(request.key[0], 0) + request.made
            lost(request, code)

        def count_ended(request):
            turn = request.key[0]
            self.ends[turn] = self.ends.get(turn, 0) + 1
            if request.made == 0:  # else all of it was made by attempts that were lost
                self.made[turn] = self.made.get(turn, 0) + request.generate
            ended(request)

        self.agents.lost, self.agents.ended = count_lost, count_ended  # type: ignore[method-assign]


def played(scenario: Scenario) -> Counted:
    """Whatever has happened: every turn has ended once, with each of its tokens made once; nobody holds anything."""
    run = Counted(scenario)
    run.play()
    load = scenario.load
    assert isinstance(load, Offline)
    asked = {f"{t.name}/{n}": turn.generate for t in load.trajectories for n, turn in enumerate(t.turns)}
    assert run.agents.failed == {}
    assert set(run.ends) == set(asked) and set(run.ends.values()) == {1}
    assert run.made == asked
    assert run.records.num_turns == len(asked) and run.records.generated_tokens == sum(asked.values())
    assert len(run.records.trajectories) == len(load.trajectories)
    assert run.requests == {} and run.policy.requests == {}
    check_integrity(run.policy)
    for engine in run.engines.values():
        if engine.alive:
            assert engine.seq == engine.tok == engine.read_q == 0
    assert all(engine.free_blocks == engine.buffer_blocks for engine in run.policy.engines.values())
    return run


def job(*incidents: Any, system: str = "dualpath", seed: int = 0, agents: int = 30, **others: Any) -> Scenario:
    return offline(SMALL, system, Source(), agents, turns=3, seed=seed, incidents=incidents, **others)


# -- nothing is lost --

incident = st.one_of(
    st.builds(Failure, st.sampled_from(["p1", "d1", "d2", "p0.1", "d0.0"]), st.floats(0, 30)),
    st.builds(Slow, st.sampled_from(["p0", "d0", "d1.1"]), st.floats(0, 10), st.floats(11, 40), st.floats(1, 5)),
    st.builds(SlowNics, st.sampled_from(["p0", "d2"]), st.floats(0, 10), st.floats(11, 40), st.floats(1, 9)),
    st.builds(Foreign, st.sampled_from(["*", "d0"]), st.floats(0, 10), st.floats(11, 40), st.floats(1e8, 2e10)),
    st.builds(Join, st.sampled_from([Role.PREFILL, Role.DECODE]), st.floats(0, 30)),
)


@settings(max_examples=15, deadline=None)
@given(incidents=st.lists(incident, max_size=3), system=st.sampled_from(["dualpath", "basic", "dualpath+split"]),
       seed=st.integers(0, 3))  # fmt: skip
def test_whatever_happens_every_turn_ends_once_with_each_token_made_once(incidents, system, seed):
    played(job(*incidents, system=system, seed=seed))


def test_the_same_seed_gives_the_same_run():
    def once() -> str:
        incidents = parse_incidents(["fail:d1@4", "slow:p0@2-9:3", "foreign:*@1:2e9", "join:prefill@5"])
        return without_cost(simulate(job(*incidents, seed=3, roles=AdaptiveRoles())))

    assert once() == once()


def test_what_happened_is_told_as_json():
    incidents = parse_incidents(["fail:d1@4", "slow:p0@2:3", "nics:p0@2-9:3", "foreign:*@1:2e9", "join:prefill@5"])
    told = json.loads(json.dumps([incident.describe() for incident in incidents], allow_nan=False))
    assert [one["kind"] for one in told] == ["fail", "slow", "nics", "foreign", "join"]
    assert told[1] == {"kind": "slow", "where": "p0", "at": 2.0, "until": None, "factor": 3.0}


# -- what each costs, by hand --


def alone(*incidents: Any, generate: int = 101, prefill: int = 1, decode: int = 1) -> Simulation:
    """An agent alone, one engine a node; its turn reads 32,000 tokens."""
    trajectory = Trajectory("a", (Turn(32_000, 300, generate),), prefix=32_000)
    cluster = Cluster(prefill, decode, engines=1, gpus=1)
    return played(Scenario(cluster, "dualpath", Offline((trajectory,), 1, True), MEAN, incidents=incidents))


def spent(run: Simulation, part: str) -> float:
    return float(run.records.column(part)[0])


def test_a_slow_engine_computes_so_many_times_slower():
    usual = alone()
    prefill_s = spent(usual, "prefill")
    slow = alone(Slow("p0", 0.0, 1e6, 3.0))
    assert spent(slow, "prefill") - prefill_s == approx(
        2 * usual.constants.compute.prefill_s([(32_000, 300)]).total_s, rel=1e-4
    )
    slow = alone(Slow("d0", 0.0, 1e6, 3.0))
    assert spent(slow, "tpot") > 2.8 * spent(usual, "tpot")  # what is not computing stays: the hand-over
    assert spent(slow, "prefill") == approx(prefill_s)


def test_only_while_it_is_slow():
    usual, after = alone(generate=401), alone(Slow("d0", 1e5, 2e5, 9.0), generate=401)
    assert after.records.column("ended")[0] == approx(usual.records.column("ended")[0])
    half = alone(Slow("d0", 5.0, 1e6, 2.0), generate=401)
    ended = float(usual.records.column("ended")[0])
    assert half.records.column("ended")[0] == approx(5.0 + 2 * (ended - 5.0), abs=0.1)


def test_slow_nics_read_so_many_times_slower():
    read_s = 32_000 * KV / SNIC
    assert spent(alone(), "read") == approx(read_s, rel=1e-3)
    both = (SlowNics("p0", 0.0, 1e6, 4.0), SlowNics("d0", 0.0, 1e6, 4.0))
    assert spent(alone(*both), "read") == approx(4 * read_s, rel=1e-3)


@pytest.mark.parametrize(("rate", "slower"), [(SNIC / 5, 1 / (1 - 0.2)), (10 * SNIC, 2.0)])
def test_foreign_traffic_takes_its_rate_or_at_most_half_of_the_nic(rate, slower):
    """A fifth of the NIC leaves 80 % to KV; traffic without end shares it evenly."""
    read_s = 32_000 * KV / SNIC
    run = alone(Foreign("*", 0.0, 1e6, rate))
    assert spent(run, "read") == approx(slower * read_s, rel=0.15)  # it comes in pieces of 50 ms
    assert spent(alone(Foreign("*", 1e5, 2e5, rate)), "read") == approx(read_s, rel=1e-3)


def test_a_lost_decode_engine_is_noticed_and_the_turn_goes_on_elsewhere():
    """It fails 2 s into decoding; the other one goes on with the tokens that are there."""
    usual = alone(generate=401, decode=2)
    where = next(iter(usual.nodes["d0"].engines)).started
    lost = Failure("d0" if where else "d1", 3.0)
    run = alone(lost, generate=401, decode=2)
    late = float(run.records.column("ended")[0] - usual.records.column("ended")[0])
    again_s = float(usual.records.column("ttft")[0])  # it is read and prefilled once more
    assert NOTICED_S < late < NOTICED_S + 2 * again_s + 1
    assert run.failed_requests == 1 and spent(run, "ttft") == approx(spent(usual, "ttft"))


def test_a_lost_prefill_engine_before_the_first_token():
    usual = alone(prefill=2)
    first = "p0" if next(iter(usual.nodes["p0"].engines)).started else "p1"
    run = alone(Failure(first, 0.1), prefill=2)
    assert spent(run, "ttft") == approx(spent(usual, "ttft") + 0.1 + NOTICED_S, abs=0.1)


def test_nobody_left_to_serve_is_a_failure_that_is_told():
    trajectory = Trajectory("a", (Turn(32_000, 300, 401), Turn(32_701, 10, 10)), prefix=32_000)
    cluster = Cluster(1, 1, engines=1, gpus=1)
    scenario = Scenario(cluster, "dualpath", Offline((trajectory,), 1, True), MEAN, incidents=(Failure("d0", 3.0),))
    told = simulate(scenario)
    assert told["failures"] == {"no_engines": 1} or list(told["failures"].values()) == [1]
    assert told["turns"] == 0 and told["trajectories"] == {"completed": 0, "failed": 1} and told["unfinished"] == 0


def test_a_node_that_joins_takes_work():
    few, more = (played(job(*incidents, agents=80)) for incidents in ((), (Join(Role.PREFILL, 1.0),)))
    assert more.nodes["p2"].engines[0].started > 0
    assert more.ended_at < few.ended_at


# -- roles --


class Once(RoleController):
    """Decides what a test says."""

    plan: tuple[tuple[float, SwitchRole], ...] = ()

    def decide(self, view, now):
        return [switch for at, switch in self.plan if at <= now < at + self.config.period_s]


def switched(monkeypatch: pytest.MonkeyPatch, *plan: tuple[float, SwitchRole], **others: Any) -> AdaptiveRoles:
    monkeypatch.setattr("loadgen.simulator.roles.RoleController", type("Planned", (Once,), {"plan": plan}))
    roles = AdaptiveRoles(others.pop("switch_s", None))
    played(job(*others.pop("incidents", ()), roles=roles, **others))
    return roles


def test_a_switch_drains_reloads_and_serves(monkeypatch):
    """38.4 GB of weights a GPU (ds-660b), two GPUs a node, through a quarter of 50 GB/s."""
    assert reload_s(SMALL) == approx(38.44e9 * 2 / 12.5e9, rel=1e-3)
    plan = ((2.0, SwitchRole("p1", Role.DECODE)), (16.0, SwitchRole("p1", Role.PREFILL)))
    roles = switched(monkeypatch, *plan, agents=120)
    first, second = roles.switches
    assert first.empty is not None and second.empty is not None and first.serving and second.serving
    assert first.decided == 2.0 < first.empty < first.serving < second.decided == 16.0 < second.empty
    assert first.serving - first.empty == approx(reload_s(SMALL))
    assert second.serving - second.empty == approx(reload_s(SMALL))
    told = roles.describe()
    assert told["count"] == 2 and told["node_s"] == approx(2 * reload_s(SMALL))
    assert told["drain_s"] == approx(first.empty - 2.0 + second.empty - 16.0)


def test_a_switch_of_a_given_time(monkeypatch):
    roles = switched(monkeypatch, (2.0, SwitchRole("p1", Role.DECODE)), switch_s=3.0, agents=60)
    (switch,) = roles.switches
    assert switch.serving - switch.empty == approx(3.0)


@pytest.mark.parametrize(("at", "switch_s"), [(2.1, None), (7.0, None), (7.0, 9.0)])
def test_a_node_that_fails_while_it_changes_its_role_is_gone(monkeypatch, at, switch_s):
    """While it drains, and while it loads weights."""
    plan = (2.0, SwitchRole("p1", Role.DECODE))
    roles = switched(monkeypatch, plan, incidents=(Failure("p1", at),), agents=60, switch_s=switch_s)
    (switch,) = roles.switches
    assert switch.serving is None and (switch.empty is None) == (at == 2.1)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_roles_that_change_at_any_time_lose_nothing(data):
    plan = [
        (float(at), SwitchRole(node, Role.DECODE if node == "p1" else Role.PREFILL))
        for node, at in (("p1", data.draw(st.integers(0, 12))), ("d1", data.draw(st.integers(0, 12))))
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        switched(monkeypatch, *plan, system=data.draw(st.sampled_from(["dualpath", "basic"])), seed=1)


def test_adapting_beats_the_ratio_it_starts_from_on_a_rollout_whose_phases_change():
    def rollout(roles: AdaptiveRoles | None) -> float:
        cluster = Cluster(3, 6, engines=1, prefill_group=9, decode_group=9)
        load = offline(cluster, "dualpath", Source(), 240, turns=40).load
        assert isinstance(load, Offline)
        load = Offline([phased(trajectory) for trajectory in load.trajectories], 240, True)
        return played(Scenario(cluster, "dualpath", load, MEAN, roles=roles)).ended_at

    roles = AdaptiveRoles()
    assert rollout(roles) < 0.97 * rollout(None)
    towards = [switch.to for switch in roles.switches]
    assert towards[0] is Role.PREFILL and towards[-1] is Role.DECODE


def test_nodes_that_a_model_needs():
    """ds-660b: 654 GB of experts over GPUs that hold 42 GB of them beside 18 GB of the rest: 16 GPUs."""
    assert least_nodes(SMALL) == 2


# -- input --


def test_incidents_as_they_are_written():
    assert parse_incidents(
        ["fail:d1@60", "fail:d1.3@6.5", "slow:p0@60-120:2", "nics:p0@60:4", "foreign:*@0-9:20e9", "join:decode@60"]
    ) == (
        Failure("d1", 60.0),
        Failure("d1.3", 6.5),
        Slow("p0", 60.0, 120.0, 2.0),
        SlowNics("p0", 60.0, float("inf"), 4.0),
        Foreign("*", 0.0, 9.0, 20e9),
        Join(Role.DECODE, 60.0),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fail", "KIND:WHERE@FROM"),
        ("burn:d1@60", "one of fail, slow, nics, foreign, join"),
        ("fail:d1@soon", "'soon' is not a number of 0 or more"),
        ("fail:d1@-5", "KIND:WHERE@FROM"),
        ("fail:d1@5:2", "has a time only: fail:d1@5"),
        ("slow:d1@5", "needs an amount"),
        ("slow:d1@5:0", "above 0"),
        ("slow:d1@5:nan", "above 0"),
        ("slow:d1@9-5:2", "'5' is not a number of 9 or more"),
        ("slow:d1@5-5:2", "ends at 5 s, but begins at 5 s"),
        ("join:storage@5", "one of prefill, decode"),
    ],
)
def test_what_is_no_incident(text, says):
    with pytest.raises(ConfigError) as refused:
        parse_incidents([text])
    assert says in str(refused.value)


@pytest.mark.parametrize("incident", [Failure("d9", 1.0), Slow("x", 1.0, 2.0, 2.0), Foreign("p7", 0.0, 1.0, 1e9)])
def test_an_incident_where_there_is_nobody(incident):
    with pytest.raises(ConfigError, match=r"the nodes are p0, p1, d0, d1, d2"):
        simulate(job(incident))


@pytest.mark.parametrize("switch_s", [-1.0, float("nan"), float("inf")])
def test_a_switch_takes_a_time(switch_s):
    with pytest.raises(ConfigError, match="give 0 or more"):
        AdaptiveRoles(switch_s)
