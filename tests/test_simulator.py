"""The simulated cluster: one turn by hand, what must hold for every system, and that it is the live decision code."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from pytest import approx

from common.perf.bounds import Turn as MeanTurn
from common.workload.hits import hits
from common.workload.trajectories import Trajectory, Turn
from loadgen.simulator import Cluster, Overheads, Scenario, offline, online, simulate
from loadgen.simulator.incidents import SlowNics
from loadgen.simulator.run import Simulation
from loadgen.systems import SYSTEMS
from loadgen.workload.load import Arrival, Offline, Online
from loadgen.workload.source import Source
from services.prefill import batching
from services.scheduler.policy import Policy, Start, check_integrity

MEAN = MeanTurn(32_426, 285, 104)
SMALL = Cluster(2, 3, engines=2)


def scenario(system: str = "dualpath", agents: int = 40, turns: int = 3, **others: Any) -> Scenario:
    return offline(SMALL, system, Source(), agents, turns=turns, **others)


def without_cost(result: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in result.items() if name != "simulator"})


# -- one turn, by hand --


def one_turn(system: str, prefix: int, append: int, generate: int) -> tuple[Simulation, float]:
    """An agent alone on 1P1D, one engine a node. The run, and its time to first token."""
    trajectory = Trajectory("a", (Turn(prefix, append, generate),), prefix=prefix)
    cluster = Cluster(1, 1, engines=1, gpus=1)
    run = Simulation(Scenario(cluster, system, Offline((trajectory,), 1, whole=True), MEAN))
    run.play()
    return run, float(run.records.column("ttft")[0])


KV = 40_016  # bytes a token
SNIC, CNIC = 50e9 / 8, 50e9  # an engine's share of the storage NIC; its own compute NIC


def fetched(run: Simulation) -> float:
    """Engines take work from their first report on."""
    return run.constants.report_s


@pytest.mark.parametrize("system", ["basic", "dualpath"])
def test_a_turn_by_hand(system: str) -> None:
    run, ttft = one_turn(system, prefix=32_000, append=300, generate=101)
    compute = run.constants.compute
    read_s = 32_000 * KV / SNIC
    forward_s = compute.prefill_s([(32_000, 300)]).total_s
    layer_s = forward_s / 61
    load_s = 32_000 * KV / CNIC
    hand_s = 32_300 * KV / CNIC
    if system == "basic":  # all layers are loaded, then computed, then sent on
        assert ttft == approx(fetched(run) + read_s + load_s + forward_s, rel=1e-6)
        staged = ttft + hand_s
    else:  # one layer is loaded before the first is computed, one is sent on after the last
        assert ttft == approx(fetched(run) + read_s + load_s / 61 + forward_s, rel=1e-6)
        staged = ttft + hand_s / 61
        assert load_s / 61 < layer_s
    begun = staged + 32_300 * KV / CNIC  # from the buffer to device memory
    decode_s = sum(compute.decode_step_s([32_300 + step]) for step in range(1, 101))
    assert run.ended_at == approx(begun + decode_s, rel=1e-6)
    assert run.nodes["p0"].snic_in.served(run.ended_at) == 32_000 * KV


def test_a_turn_by_hand_read_on_the_decode_side_and_stored() -> None:
    run, ttft = one_turn("dualpath", prefix=0, append=1000, generate=1)
    assert ttft == approx(fetched(run) + run.constants.compute.prefill_s([(0, 1000)]).total_s, rel=1e-6)
    assert run.nodes["d0"].snic_out.sent == 1000 // 64 * 64 * KV


def test_oracle_moves_nothing() -> None:
    run, ttft = one_turn("oracle", prefix=32_000, append=300, generate=2)
    forward_s = run.constants.compute.prefill_s([(32_000, 300)]).total_s
    assert ttft == approx(fetched(run) + forward_s, rel=1e-6)
    assert run.ended_at == approx(ttft + run.constants.compute.decode_step_s([32_301]), rel=1e-6)
    assert not any(engine.tx.sent or engine.rx.sent for engine in run.engines.values())


# -- every system --


def check_ended(run: Simulation) -> None:
    """Every turn has ended once, and nothing is left anywhere."""
    assert run.records.num_turns == run.agents.offered == run.agents.attempted
    assert not run.requests and not run.policy.requests and not run.agents.failed
    check_integrity(run.policy)
    for engine in run.policy.engines.values():
        assert engine.free_blocks == engine.buffer_blocks
    for engine in run.engines.values():
        assert not engine.requests and engine.seq == engine.tok == engine.read_q == 0
        pool = getattr(engine, "pool", None)
        if pool is not None:
            pool.check_integrity()
        else:
            assert engine.free == engine.pages  # type: ignore[attr-defined]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_turn_ends_once_and_every_hit_is_read_once(system: str) -> None:
    job = scenario(system)
    run = Simulation(job)
    run.play()
    check_ended(run)
    read = sum(node.snic_in.served(run.ended_at) for node in run.nodes.values())
    hit = sum(sum(hits(trajectory)) for trajectory in job.load.trajectories)
    if SYSTEMS[system].free:
        assert read == 0
    elif not SYSTEMS[system].tier_bytes:
        assert read == approx(hit * KV, rel=1e-9)
    sides = {node.name[0] for node in run.nodes.values() if node.snic_in.served(run.ended_at)}
    both = SYSTEMS[system].read_side != "pe_only"
    assert sides == (set() if SYSTEMS[system].free else {"p", "d"} if both else {"p"})


def test_the_same_scenario_gives_the_same_result() -> None:
    assert without_cost(simulate(scenario())) == without_cost(simulate(scenario()))
    assert without_cost(simulate(scenario(seed=1))) != without_cost(simulate(scenario(seed=2)))


def test_systems_are_ordered_under_load() -> None:
    jobs = {system: simulate(scenario(system, agents=150))["makespan_s"] for system in SYSTEMS}
    assert jobs["oracle"] < jobs["dualpath"] < jobs["basic+layerwise"] < jobs["basic"]


def test_more_agents_take_longer_and_more_nodes_less() -> None:
    times = [simulate(scenario(agents=agents))["makespan_s"] for agents in (40, 120, 360)]
    assert times == sorted(times)
    bigger = offline(Cluster(4, 6, engines=2), "dualpath", Source(), 360, turns=3)
    assert simulate(bigger)["makespan_s"] < times[-1]


def test_decisions_and_packing_are_the_live_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    handle = Policy.handle
    quota_largest = batching.Quota.largest

    def spied(self: Policy, event: object, now: float) -> Any:
        seen[type(event).__name__] += 1
        return handle(self, event, now)  # type: ignore[arg-type]

    def largest(self: batching.Quota, cached: int, most: int, spent_s: float) -> int:
        seen["quota"] += 1
        return quota_largest(self, cached, most, spent_s)

    monkeypatch.setattr(Policy, "handle", spied)
    monkeypatch.setattr(batching.Quota, "largest", largest)
    run = Simulation(scenario())
    assert isinstance(run.policy, Policy)
    run.play()
    turns = run.agents.offered
    for event in ("RequestArrived", "PrefillEnded", "KvHandedOver", "RequestEnded"):
        assert seen[event] == turns
    assert seen["Fetched"] and seen["quota"] >= turns


# -- online --


def test_online_agents_come_at_their_times() -> None:
    job = online(SMALL, "dualpath", Source(), aps=2.0, duration_s=60.0, turns=3)
    assert isinstance(job.load, Online)
    result = simulate(job)
    assert result["given_up"] is False
    assert result["attempted"] <= result["offered"]
    assert result["turns"] + result["unfinished"] == result["attempted"]
    assert result["verdict"]["met"]
    assert result["ttft_ms"]["p50"] < 1000


def test_too_many_agents_are_given_up() -> None:
    result = simulate(online(SMALL, "basic", Source(), aps=40.0, duration_s=60.0, turns=3, misses=20))
    assert result["given_up"] and not result["verdict"]["met"]


def test_tool_time_is_kept() -> None:
    turns = (Turn(0, 100, 3), Turn(103, 100, 3, think_s=7.0))
    quick = (Turn(0, 100, 3), Turn(103, 100, 3))
    spans = []
    for played in (turns, quick):
        load = Online((Arrival(1.0, "a", Trajectory("a", played)),), 100.0, 99)
        run = Simulation(Scenario(SMALL, "dualpath", load, MEAN))
        run.play()
        spans.append(run.records.trajectories[0, 1])
    assert spans[0] == approx(spans[1] + 7.0)


def test_overheads_are_added_to_every_turn() -> None:
    slower = scenario(agents=1, turns=1, overheads=Overheads(turn_s=0.5))
    plain = simulate(scenario(agents=1, turns=1))["ttft_ms"]["mean"]
    assert simulate(slower)["ttft_ms"]["mean"] == approx(plain + 500 - 1e3 * Overheads().report_s, abs=0.01)
    # less the first report of the engines, which they have made by then


def test_a_split_read_follows_the_rates_of_both_sides() -> None:
    """A storage NIC of a fourth of the rate reads a fifth, once that is known; live sides measure it likewise."""
    turns = tuple(Turn(32_000 + 40 * number, 30, 10) for number in range(40))
    load = Offline((Trajectory("a", turns, prefix=32_000),), 1, whole=True)
    shares = []
    for incidents in ((), (SlowNics("p0", 0.0, 1e6, 4.0),)):
        scenario = Scenario(Cluster(1, 1, engines=1), "dualpath+split", load, MEAN, incidents=incidents)
        run = Simulation(scenario)
        run.play()
        here, there = (run.nodes[name].snic_in.served(run.ended_at) for name in ("p0", "d0"))
        shares.append(here / (here + there))
    assert shares == [approx(1 / 2, rel=0.01), approx(1 / 5, rel=0.1)]


def test_a_tier_keeps_what_was_read() -> None:
    """The second turn of an agent alone reads nothing that the first one read, on the same engine."""
    turns = (Turn(32_000, 300, 5), Turn(32_305, 300, 5))
    load = Offline((Trajectory("a", turns, prefix=32_000),), 1, whole=True)
    cluster = Cluster(1, 1, engines=1)
    read = {}
    for system in ("basic", "tiered"):
        run = Simulation(Scenario(cluster, system, load, MEAN))
        run.play()
        check_ended(run)
        read[system] = run.nodes["p0"].snic_in.served(run.ended_at) / KV
    assert read["basic"] == 32_000 + 32_256
    assert read["tiered"] == 32_256  # the blocks that the first turn has added were never read


def test_a_tier_finds_what_its_engine_has_read_before() -> None:
    """With room for everything: of each turn, the hits of the trajectory's last turn on the same engine."""
    job = scenario("tiered", agents=60, turns=8)
    run = Simulation(job)
    start, seen, lacking = run._start, {}, 0

    def spied(action: Any) -> None:
        nonlocal lacking
        request = run.requests[action.key]
        place = (request.player.name, action.prefill)
        lacking += request.hit - min(seen.get(place, 0), request.hit)
        seen[place] = max(seen.get(place, 0), request.hit)
        start(action)

    run._run[Start] = spied
    run.play()
    check_ended(run)
    read = sum(node.snic_in.served(run.ended_at) for node in run.nodes.values()) / KV
    hit = sum(sum(hits(trajectory)) for trajectory in job.load.trajectories)
    assert read == approx(lacking, rel=1e-9)
    assert 0.3 * hit < read < 0.9 * hit


def test_a_tier_lies_between_basic_and_both_read_paths() -> None:
    """Long enough that most hits have been read by the same engine before: 7 % of them are read again."""
    cluster = Cluster(2, 4, engines=1)
    told = {name: simulate(offline(cluster, name, Source(), 80, turns=32)) for name in ("basic", "tiered", "dualpath")}
    jct = {name: one["makespan_s"] for name, one in told.items()}
    assert jct["dualpath"] < jct["tiered"] < 0.85 * jct["basic"]
    read = {name: sum(b for nic, b in one["nic_bytes"].items() if "snic rx" in nic) for name, one in told.items()}
    assert read["tiered"] < 0.15 * read["basic"]
