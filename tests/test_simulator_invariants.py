"""Whatever the cluster, the system and the load: every turn ends once, nothing is lost, buffers are as before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.perf.bounds import Turn as MeanTurn
from common.perf.models import get_model_profile
from common.workload.hits import hits
from common.workload.trajectories import Trajectory, Turn
from loadgen.simulator import Cluster, Overheads, Scenario
from loadgen.simulator.decode import DecodeEngine
from loadgen.simulator.run import Simulation
from loadgen.systems import SYSTEMS
from loadgen.workload.load import Arrival, Load, Offline, Online
from services.scheduler.policy import check_integrity

MEAN = MeanTurn(32_426, 285, 104)
MODEL = get_model_profile("ds-660b")


@st.composite
def trajectories(draw: st.DrawFn, number: int) -> Trajectory:
    """A few turns, some of which fall back to a part of the history."""
    prefix = history = 64 * draw(st.integers(0, 600))
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        context = history if draw(st.booleans()) else draw(st.integers(0, history))
        think_s = draw(st.sampled_from([0.0, 0.0, 3.0]))
        turns.append(Turn(context, draw(st.integers(1, 9_000)), draw(st.integers(1, 400)), think_s))
        history = turns[-1].total
    return Trajectory(f"t{number}", tuple(turns), prefix)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    played = tuple(draw(trajectories(number)) for number in range(draw(st.integers(1, 12))))
    if draw(st.booleans()):
        return Offline(played, draw(st.integers(1, len(played))), whole=True)
    arrivals = [
        Arrival(at, trajectory.name, trajectory)
        for at, trajectory in zip(sorted(draw(st.floats(0.0, 20.0)) for _ in played), played, strict=True)
    ]
    return Online(arrivals, 3600.0, 1 << 30)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small nodes, with little memory of each kind now and then."""
    model = replace(
        MODEL,
        dram_bytes=draw(st.sampled_from([25e9, 80e9])),
        prefill_kv_bytes=draw(st.sampled_from([3e9, 4e9])),
        # what the weights leave of a decode engine's memory: hardly more than the longest context, or a lot
        shared_params=draw(st.sampled_from([MODEL.shared_params, 47.8e9])),
    )
    cluster = Cluster(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        model,
        engines=draw(st.integers(1, 2)),
        copies_free=draw(st.booleans()),
        moved_layers=draw(st.sampled_from([0, 8])),
    )
    overheads = Overheads(draw(st.sampled_from([0.0, 0.05])), 0.01, draw(st.sampled_from([0.0, 0.01])))
    return Scenario(cluster, draw(st.sampled_from(sorted(SYSTEMS))), draw(loads()), MEAN, overheads=overheads)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_every_turn_ends_once_and_nothing_is_left(scenario: Scenario) -> None:
    run = Simulation(scenario)
    run.play()
    agents = run.agents
    failed = sum(agents.failed.values())
    # a preempted turn is tried again, thrice at most; its trajectory ends with it
    assert run.records.num_turns + failed == agents.attempted <= agents.offered
    assert failed or agents.attempted == agents.offered
    assert not run.requests and not run.policy.requests
    check_integrity(run.policy)
    preemptions = 0
    for engine in run.engines.values():
        assert not engine.requests and engine.seq == engine.tok == engine.read_q == 0
        if isinstance(engine, DecodeEngine):
            assert engine.free == engine.pages and not engine.running
            preemptions += engine.preemptions
        else:
            engine.pool.check_integrity()  # type: ignore[attr-defined]
    assert preemptions == run.failed_requests
    ttft = run.records.column("ttft")
    assert (ttft > 0).all() and (run.records.column("ended") <= run.ended_at).all()
    system = SYSTEMS[scenario.system]
    hit = sum(sum(hits(trajectory)) for trajectory in scenario.load.trajectories)
    read = sum(node.snic_in.served(run.ended_at) for node in run.nodes.values())
    if system.free:
        assert read == 0
    elif not preemptions and not system.tier_bytes:
        assert abs(read - hit * run.constants.kv_bytes) <= 1e-6 * read
