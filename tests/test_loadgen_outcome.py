"""What a run comes to: times of the real cluster, rates while all agents were active, balance out of counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages import Member, MemberStatus
from common.types import Role
from loadgen.measures.observe import Sample
from loadgen.measures.outcome import Witness, level_rate, nic_bytes, outcome, unstretched
from loadgen.measures.turns import RunLog, Slo, TrajectoryRecord, TurnRecord


def turn(ended: float, parts: dict[str, float] | None = None) -> TurnRecord:
    times = [ended - 4.0, ended]
    return TurnRecord("s", 0, ended - 8, ended - 8, ended, 1000, 2, times, parts=parts or {}, cached_tokens=960)


def member(role: Role, node: str, group: str = "", **counters: float) -> MemberStatus:
    name = f"{node}.{role.value}"
    return MemberStatus(Member(role, name, name, "", node, 1, group=group), counters)


def sample(at: float, p0: float, p1: float) -> Sample:
    """Bytes that the gateway wrote to p0 and p1, and what p1 sent itself; attention of two engines of a group."""
    nic = "nic_bytes_total{{direction={},intent=kv_load,nic={},traffic_class=kv}}"
    return Sample(
        at,
        [
            MemberStatus(
                Member(Role.STORAGE_GATEWAY, "store", "store", "", "store", 1),
                {nic.format("rx", "p0/snic"): p0, nic.format("rx", "p1/snic"): p1},
            ),
            member(Role.TRAFFIC_MANAGER, "p0", **{nic.format("tx", "p0/p0.tm/cnic"): 1e9}),
            member(Role.TRAFFIC_MANAGER, "p1", **{nic.format("tx", "p1/snic"): 10.0}),
            member(
                Role.PREFILL, "p0", "prefill", attention_seconds_total=at,
                group_attention_max_seconds_total=at * at, group_attention_mean_seconds_total=100 * at,
            ),
            member(Role.PREFILL, "p1", "prefill", attention_seconds_total=at / 3),
        ],
        waiting=0,
        running=0,
    )


#: Started at 100 in a cluster at a quarter of the speed: 40 wall seconds, 10 real ones. All agents are active from the
#: first end of a trajectory (108) to the last start of one (128): 5 real seconds.
LOG = RunLog(
    offered=10,
    started=100.0,
    ended=140.0,
    last_start=128.0,
    turns=[turn(at, {"scheduling_s": 2.0, "read_s": 4.0 * at}) for at in (108.0, 112.0, 120.0, 128.0, 136.0)],
    trajectories=[TrajectoryRecord("s", 100.0, 108.0, completed=True)],
)
HITS = {"s": [960]}
WITNESS = Witness(
    samples=[sample(*row) for row in ((100, 0, 0), (108, 100, 100), (118, 400, 200), (128, 500, 500), (140, 9e9, 0))],
    missed_samples=0,
    lags=[0.0] * 98 + [0.2] * 2,
    cpu=0.5,
    cpu_s={"p0": 1.0},
    hits=HITS,
)


def test_all_durations_are_divided() -> None:
    real = unstretched(LOG, 4.0)
    assert (real.started, real.ended, real.last_start) == (100.0, 110.0, 107.0)
    first = real.turns[0]
    assert (first.intended, first.times, first.parts["read_s"]) == (100.0, [101.0, 102.0], 108.0)
    assert first.ttft == LOG.turns[0].ttft / 4  # type: ignore[operator]
    assert LOG.ended == 140.0


def test_rate_while_all_agents_were_active() -> None:
    # turns that ended in (102, 107]: at 103, 105 and 107
    assert level_rate(unstretched(LOG, 4.0)) == pytest.approx(3 / 5)


def test_no_rate_without_such_a_time() -> None:
    assert level_rate(RunLog(1, 0.0, 1.0, last_start=0.0, turns=[turn(1.0)])) is None


def test_outcome() -> None:
    told = outcome(LOG, Slo(), WITNESS, 4.0)
    assert told["turns_per_s"] == pytest.approx(0.6)
    assert told["job_s"] == pytest.approx(10 / 0.6)
    assert told["makespan_s"] is None  # five of ten turns ended
    assert told["ttft_ms"]["mean"] == 1000.0
    assert told["ttft_parts_s"] == pytest.approx({"scheduling": 0.5, "allocation": 0, "read": 120.8, "prefill": 0})
    assert told["ttft_parts_p50_s"]["read"] == 120.0


def test_storage_nics_are_balanced_over_nodes_while_all_agents_were_active() -> None:
    # the windows to 118 (300 to 100) and to 128 (100 to 300); compute NICs are something else
    snic = outcome(LOG, Slo(), WITNESS, 4.0)["balance"]["snic"]
    assert snic["mean"] == pytest.approx(1.5)
    assert snic["overall"] == pytest.approx(1.0)
    assert (snic["at_s"], snic["max_over_avg"]) == ([4.5, 7.0], [1.5, 1.5])


def test_windows_hold_as_many_requests_as_those_of_a_whole_node() -> None:
    # a fifth of the GPUs: 5 s instead of 1 s, from 102 to 107 in real time
    snic = outcome(LOG, Slo(), WITNESS, 4.0, share=0.2)["balance"]["snic"]
    assert (snic["window_s"], snic["at_s"], snic["max_over_avg"]) == (5.0, [7.0], [1.0])


def test_attention_is_compared_within_a_group() -> None:
    attention = outcome(LOG, Slo(), WITNESS, 4.0)["balance"]["attention"]
    assert attention["mean"] == pytest.approx(1.5)  # 3 to 1
    # forward by forward, as the leader counted them from 108 to 128
    assert attention["rounds"] == pytest.approx((128**2 - 108**2) / (100 * (128 - 108)))


def test_attention_over_the_first_part_of_a_job() -> None:
    # 40 turns at 0.6 a second: 66.7 s, whose first 3.3 s have the samples at 100 and (in real time) 102
    log = replace(LOG, offered=40)
    first = outcome(log, Slo(), WITNESS, 4.0)["balance"]["attention"]["first_5_percent"]
    assert first["until_s"] == pytest.approx(0.05 * 40 / 0.6)
    assert first["mean"] == pytest.approx(1.5)
    assert first["rounds"] == pytest.approx((108**2 - 100**2) / (100 * (108 - 100)))
    # of a job of 10 turns the first 0.8 s have one sample only
    first = outcome(LOG, Slo(), WITNESS, 4.0)["balance"]["attention"]["first_5_percent"]
    assert (first["mean"], first["rounds"]) == (None, None)


def test_bytes_of_each_nic_over_the_run() -> None:
    bytes_ = nic_bytes(WITNESS.samples[:3])
    assert bytes_["p0/snic rx kv"] == 400
    assert bytes_["p1/snic tx kv"] == 0  # ten at both ends


@pytest.mark.parametrize(("flag", "witness"), [
    ("client_not_saturated", WITNESS),
    ("not_cpu_bound", Witness([], 0, [], 0.95, {}, HITS)),
    ("cache_warm", Witness([], 0, [], 0.1, {}, {"s": [1000]})),
    ("observed", Witness([], 1, [], 0.1, {}, HITS)),
    ("nothing_logged", Witness([], 0, [], 0.1, {}, HITS, "p0: error")),
])
def test_each_flag_alone(flag: str, witness: Witness) -> None:
    validity = outcome(LOG, Slo(), witness, 4.0)["validity"]
    assert {name for name, told in validity.items() if not told["ok"]} == {flag}
