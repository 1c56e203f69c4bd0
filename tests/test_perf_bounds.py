"""What bounds a cluster, and how a live one is scaled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.perf.bounds import Plan, Resource, Turn, bottleneck_free_range
from common.perf.hardware import HARDWARE
from common.perf.models import DS_27B, DS_660B, MODELS
from common.perf.scaling import Scaling

H800 = HARDWARE["h800"]
TURN = Turn(hit=32_400, miss=284, generated=105)  # the paper's 64K set, pooled


def test_what_binds_the_main_experiment():
    """2P4D, a turn reads 32,400 x 40,016 = 1.2965 GB: the prefill nodes' NICs 100 / 1.2965 = 77.13 turns/s, all six
    231.4; 16 GPUs at 300 TFLOP/s over 40.13 TFLOP a turn give about 119.6."""
    plan = Plan(DS_660B, H800, 2, 4, TURN)
    assert plan.turns_per_s(Resource.PE_SNICS) == pytest.approx(77.13, rel=1e-3)
    assert plan.turns_per_s(Resource.ALL_SNICS) == pytest.approx(231.4, rel=1e-3)
    assert plan.turns_per_s(Resource.PREFILL) == pytest.approx(119.6, rel=2e-2)
    assert plan.bound("basic").resource is Resource.PE_SNICS
    assert plan.bound("dualpath").resource is Resource.PREFILL
    assert plan.bound("oracle") == plan.bound("dualpath")


def test_reading_411_tb_on_the_prefill_side_alone_takes_4111_s():
    agents = round(411e12 / (TURN.hit * DS_660B.kv_bytes_per_token) / 157)
    plan = Plan(DS_660B, H800, 2, 4, TURN)
    assert plan.job_completion_s("basic", agents, 157) == pytest.approx(4111, rel=1e-3)


def test_a_few_agents_are_bound_by_their_own_turns():
    plan = Plan(DS_660B, H800, 2, 4, TURN)
    assert plan.job_completion_s("dualpath", 1, 157) == pytest.approx(157 * plan.turn_s("dualpath"))
    # a turn's read through one idle node's NIC: 1.2965 GB at 50 GB/s
    assert plan.turn_s("dualpath") - plan.turn_s("oracle") == pytest.approx(0.02593, rel=1e-3)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (1, 2)])
def test_ds_27b_is_bound_by_the_nics_that_it_may_use(nodes):
    """So Basic 1P1D = Basic 1P2D, and DualPath 1P1D = Basic 2P1D."""
    prefill, decode = nodes
    plan = Plan(DS_27B, H800, prefill, decode, TURN)
    a_nic = 50e9 / (TURN.hit * 19_680)
    assert plan.bound("basic").turns_per_s == pytest.approx(prefill * a_nic)
    assert plan.bound("dualpath").turns_per_s == pytest.approx((prefill + decode) * a_nic)


@given(st.sampled_from(list(MODELS.values())), st.integers(1, 8), st.integers(1, 8), st.integers(1, 500))
def test_each_system_needs_less_than_the_one_before(model, prefill, decode, agents):
    plan = Plan(model, H800, prefill, decode, TURN)
    basic, dualpath, oracle = (plan.job_completion_s(s, agents, 10) for s in ("basic", "dualpath", "oracle"))
    assert basic >= dualpath >= oracle > 0


@given(st.sampled_from(list(MODELS.values())), st.integers(1, 4), st.integers(1, 4))
def test_a_cluster_of_shares_is_that_part_of_the_real_one(model, prefill, decode):
    whole, share = (Plan(model, H800, prefill, decode, TURN, gpus) for gpus in (8, 1))
    for resource in Resource:
        assert whole.turns_per_s(resource) == pytest.approx(8 * share.turns_per_s(resource))


def test_the_description_names_what_binds():
    systems = Plan(DS_660B, H800, 2, 4, TURN).describe(agents=2000, turns=157)["systems"]
    assert systems["basic"]["bound_by"] == "storage NICs of the prefill nodes"
    assert systems["basic"]["job_completion_s"] > systems["dualpath"]["job_completion_s"]


def test_the_description_has_the_ratio_of_nodes_and_where_nothing_else_binds():
    described = Plan(DS_660B, H800, 2, 4, TURN).describe()
    assert described["prefill_per_decode"] == 0.5
    assert described["bottleneck_free"] == pytest.approx((1 / 7, 7 / 2))


def test_the_bottleneck_free_range():
    """The paper's node: 1/7 <= P/D <= 7/2. Four compute NICs: from 1/3 to min(2, 3/2, 7/2). DRAM of 150 GB/s: none."""
    assert bottleneck_free_range(8, 1, 50e9, 500e9) == pytest.approx((1 / 7, 7 / 2))
    assert bottleneck_free_range(4, 1, 50e9, 500e9) == pytest.approx((1 / 3, 3 / 2))
    assert bottleneck_free_range(8, 1, 50e9, 150e9) is None
    assert bottleneck_free_range(8, 5, 50e9, 1e13) is None


# -- scaling --

SCALED = Scaling(DS_660B, H800, gpus=1, time_factor=3.0, moved_layers=8, row_bytes=64)


def test_a_scaled_engine():
    """40,016 / 512 = 78.16; an eighth of 50 GB/s of storage and one NIC of 50 GB/s, both by 78.16 and by 3."""
    geometry = SCALED.geometry(64)
    assert (geometry.bytes_per_token, geometry.full_block_bytes, geometry.layer_block_bytes) == (512, 32_768, 4096)
    assert SCALED.byte_scale == pytest.approx(78.156, rel=1e-4)
    assert SCALED.snic_rate == pytest.approx(6.25e9 / 78.156 / 3, rel=1e-4)
    assert SCALED.cnic_rate == pytest.approx(8 * SCALED.snic_rate)
    assert SCALED.prefill_memory == pytest.approx(4e9 / 78.156, rel=1e-4)
    assert SCALED.buffer == pytest.approx(10e9 / 78.156, rel=1e-4)
    assert SCALED.decode_memory == SCALED.compute.kv_tokens() * 512


@given(
    st.sampled_from(list(MODELS.values())),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(0.1, 10),
    st.integers(1, 64),
    st.sampled_from([16, 64, 256]),
)
def test_a_context_is_read_in_the_real_clusters_time(model, gpus, factor, layers, row_bytes):
    """Whatever the scale: a live read takes time_factor times as long as a real one of the engine's share."""
    scaled = Scaling(model, H800, gpus, factor, layers, row_bytes)
    real_s = 32_768 * model.kv_bytes_per_token / (50e9 * gpus / 8)
    live_s = scaled.geometry(64).full_block_bytes * 512 / scaled.snic_rate
    assert live_s == pytest.approx(factor * real_s)
    # as many contexts fit as in reality
    assert scaled.prefill_memory / scaled.geometry(64).bytes_per_token == pytest.approx(
        gpus * model.prefill_kv_bytes / model.kv_bytes_per_token, rel=1e-2
    )


def test_thresholds_of_the_paper_do_not_depend_on_the_scale():
    """alpha: 3 s of 6.25 GB/s / 40,016 = 468,562 tokens; beta: 5 s of 300 TFLOP/s over turns of 40.13 TFLOP."""
    derived = SCALED.thresholds(32_400, 284)
    assert derived.alpha == 468_562
    assert derived.beta == pytest.approx(5 * 300 / 40.13 * 32_684, rel=2e-2)
    assert Scaling(DS_660B, H800, 1, 1.0, 61, 656).thresholds(32_400, 284) == derived


def test_the_description_states_every_factor():
    described = SCALED.describe()
    assert described["time_factor"] == 3.0
    assert "divided by 78.2" in described["statement"]
    assert described["hardware"]["efficiency"]["linear_experts"] == 0.15
