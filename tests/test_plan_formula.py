"""The planner's formulas and rules: hand-computed values, and what is refused with which nearest value."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.perf.bounds import bottleneck_free_range, ratio_limits, shares_when_saturated
from common.perf.hardware import HARDWARE, Hardware
from common.perf.units import parse_rate, show_rate
from loadgen.measures.turns import Slo
from loadgen.plan.planner import candidate, demand, describe_range, fewest_nodes, num_parts, roomiest
from loadgen.plan.rules import Asked, asked, machine
from loadgen.simulator.steady import get_stream

NODE = HARDWARE["h800"]


def wanted(nodes: str | None = None, aps: float = 0.4, model: str = "ds-660b", node: Hardware = NODE) -> Asked:
    return asked(model, node, "64k", aps, "dualpath", Slo(), nodes)


def test_the_papers_node() -> None:
    """g=8, s=1, M=500 GB/s, sB=50 GB/s: 1/7 <= P/D <= 7/2; (g-2s)/s = 6, (g-s)/(2s) = 3.5, (10-3)/2 = 3.5."""
    limits = {limit.resource: (limit.least, limit.greatest) for limit in ratio_limits(8, 1.0, 50e9, 500e9)}
    assert limits["PE compute NIC, write"] == (pytest.approx(1 / 7), inf)
    assert limits["DE compute NIC, read"] == (0.0, 6.0)
    assert limits["DE compute NIC, write"] == (0.0, 3.5)
    assert limits["DE DRAM"] == (0.0, 3.5)
    assert limits["PE compute NIC, read"] == limits["PE DRAM"] == (0.0, inf)


def test_a_storage_nic_of_two_compute_nics_in_slow_memory() -> None:
    """g=8, s=2, B=50, M=600 GB/s, sB=100: 2/6 <= P/D; (8-4)/2 = 2, (8-2)/4 = 1.5, (6-3)/2 = 1.5; 200 <= 600 holds."""
    assert bottleneck_free_range(8, 2.0, 50e9, 600e9) == pytest.approx((1 / 3, 1.5))


@given(st.integers(2, 16), st.floats(0.1, 4.0), st.floats(1e9, 100e9), st.floats(1e11, 2e12), st.floats(0.05, 10.0))
def test_a_ratio_is_in_the_range_if_and_only_if_nothing_else_is_full(
    gpus: int, share: float, cnic: float, dram: float, ratio: float
) -> None:
    used = shares_when_saturated(gpus, share, cnic, dram, ratio)
    within = {limit.resource: limit.least <= ratio <= limit.greatest for limit in ratio_limits(gpus, share, cnic, dram)}
    assert used.keys() == within.keys()
    for name, use in used.items():
        if abs(use - 1) > 1e-9:
            assert within[name] == (use < 1), name


def test_what_is_in_use_at_2p4d() -> None:
    """P/D = 1/2, one CNIC's worth of SNIC over 8: writes of a PE (1/8)(1+2), reads of a DE (1/8)(2.5), writes
    (1/8)(2); DRAM of a DE (3+1) x 50 / 500."""
    used = shares_when_saturated(8, 1.0, 50e9, 500e9, 0.5)
    assert used["PE compute NIC, write"] == pytest.approx(3 / 8)
    assert used["DE compute NIC, read"] == pytest.approx(2.5 / 8)
    assert used["DE compute NIC, write"] == pytest.approx(2 / 8)
    assert used["DE DRAM"] == pytest.approx(0.4)


def test_what_names_the_range() -> None:
    told = describe_range(NODE)
    assert (told["least"], told["greatest"]) == pytest.approx((1 / 7, 3.5))
    assert told["least_by"] == "PE compute NIC, write" and told["greatest_by"] == "DE compute NIC, write"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400gbit", 50e9), ("400Gbit/s", 50e9), ("400 gbps", 50e9), ("500GB/s", 500e9), ("1.5TB/s", 1.5e12)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate("--cnic", text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "400", "400Gb", "gbit", "-1gbit", "0gbit", "nan gbit", "1e400GB/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--snic .* is not a rate above 0: write, say, 400gbit or 50GB/s"):
        parse_rate("--snic", text)


def test_a_rate_is_shown_both_ways() -> None:
    assert show_rate(50e9) == "50 GB/s (400 gbit)"


# -- demand and candidates --


def test_the_demand_of_the_papers_online_load() -> None:
    """0.4 agents/s x 157 turns = 62.8 turns/s; each reads 32.4K tokens of 40,016 bytes: 81 GB/s, of 300 at 2P4D."""
    told = wanted()
    stream = get_stream(told.source, 99_000, 4)
    asked_for = demand(told, stream)
    assert asked_for["turns_per_s"] == pytest.approx(62.8, rel=1e-3)
    assert asked_for["read_bytes_per_s"] == pytest.approx(81.4e9, rel=1e-2)
    found = candidate(told, stream, (2, 4))
    assert found.use["all storage NICs"] == pytest.approx(81.4 / 300, rel=1e-2)
    assert found.use["DE DRAM"] == pytest.approx(0.4 * 81.4 / 300, rel=1e-2)
    assert found.name == "2P4D" and found.nodes == 6


def test_the_roomiest_shape_comes_first_and_none_is_too_small_for_the_model() -> None:
    told = wanted()
    stream = get_stream(told.source, 99_000, 4)
    found = roomiest(told, stream, 8)
    assert {one.shape for one in found} == {(2, 6), (3, 5), (4, 4)}
    assert [one.fullest for one in found] == sorted(one.fullest for one in found)


def test_more_agents_need_more_nodes() -> None:
    stream = get_stream(wanted().source, 99_000, 4)
    counts = [fewest_nodes(wanted(aps=aps), stream) for aps in (0.1, 0.4, 1.0, 4.0)]
    assert counts[0] == 6 and counts == sorted(counts) and counts[-1] > counts[0]
    fullest = roomiest(wanted(aps=4.0), stream, counts[-1])[0].fullest
    assert fullest <= 1


@pytest.mark.parametrize("aps", [0.4, 8.8, 100.0])
def test_a_heavy_load_is_shared_by_equal_clusters(aps: float) -> None:
    """A run of at least 20 s, of 15,000 turns at most, of 157 an agent: 0.4 agents/s (1,256 turns) are served by one
    cluster, 8.8 (27,632) by two, 100 (314,000) by 21."""
    told = wanted(aps=aps)
    stream = get_stream(told.source, 99_000, 4)
    parts = num_parts(told, stream)
    assert parts == {0.4: 1, 8.8: 2, 100.0: 21}[aps]
    nodes = fewest_nodes(told, stream)
    assert nodes % parts == 0 and roomiest(told, stream, nodes)[0].fullest <= 1
    assert all(count % parts == 0 for one in roomiest(told, stream, nodes) for count in one.shape)


def test_a_shape_that_is_given_is_divided_only_where_the_model_fits() -> None:
    stream = get_stream(wanted().source, 99_000, 4)
    shapes = {"2P4D": 1, "40P80D": 20, "41P80D": 1, "63P84D": 21}
    assert {name: num_parts(wanted(name, aps=100.0), stream) for name in shapes} == shapes


# -- bad input --


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpus": 0}, r"--gpus-per-node 0 must be from 1 to 64: the nearest is 1"),
        ({"gpus": 65}, r"the nearest is 64"),
        ({"name": "h900"}, r"--hardware 'h900' is unknown: one of h800, h100; the nearest is h800"),
        (
            {"snic": "2000gbit"},
            r"--snic 250 GB/s \(2000 gbit\) is more than half of the compute NICs .* at most 200 GB/s",
        ),
        ({"dram": "90GB/s"}, r"more than half of DRAM .* at most 45 GB/s \(360 gbit\)"),
    ],
)
def test_machines_that_cannot_be(change: dict[str, object], told: str) -> None:
    parts = {"name": "h800", "gpus": 8, "cnic": "400gbit", "snic": "400gbit", "dram": "500GB/s"}
    with pytest.raises(ConfigError, match=told):
        machine(**(parts | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "ds-670b"}, r"--model 'ds-670b' is unknown: .* the nearest is ds-660b"),
        ({"workload": "60k"}, r"--workload '60K' is unknown: one of 32K, 48K, 64K; the nearest is 64K"),
        ({"system": "dual"}, r"--system 'dual' is unknown: .* the nearest is \+dual"),
        ({"aps": 0.0}, r"--aps 0 must be above 0 and at most 1000 agents a second: write 0.1"),
        ({"aps": float("nan")}, r"--aps nan must be above 0"),
        ({"aps": 5000.0}, r"write 1000"),
        ({"slo": Slo(0.0, 0.05)}, r"--slo-ttft 0 must be above 0, in seconds: write, say, 4"),
        ({"slo": Slo(4.0, float("inf"))}, r"--slo-tpot inf must be above 0, in seconds: write, say, 0.05"),
        ({"nodes": "1P1D"}, r"--nodes 1P1D: ds-660b does not fit: .* 2 prefill and 4 decode .* the nearest is 2P4D"),
        ({"nodes": "8P1D"}, r"the nearest is 8P4D"),
        ({"nodes": "2P"}, r"'2P' is not a shape: write, say, 2P4D"),
    ],
)
def test_loads_that_cannot_be(change: dict[str, object], told: str) -> None:
    parts = {"model": "ds-660b", "workload": "64k", "aps": 0.4, "system": "dualpath", "slo": Slo(), "nodes": None}
    with pytest.raises(ConfigError, match=told):
        asked(hardware=NODE, **(parts | change))  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_its_gpus() -> None:
    """ds-660b has 18 + 654 / 32 = 38.4 GB of weights a GPU; of 40 GB of HBM 36 are for them."""
    small = Hardware("small", 989e12, 1979e12, 3.35e12, hbm_bytes=40e9)
    with pytest.raises(ConfigError, match=r"ds-660b does not fit: 38\.4 GB of weights a GPU, 36\.0 GB of HBM"):
        wanted(node=small)


def test_a_context_larger_than_the_staging_buffers() -> None:
    """64 GPUs share 80 GB: 1.25 GB each, 31,236 tokens of 40,016 bytes; a context of 65,536 needs 2.62 GB."""
    with pytest.raises(
        ConfigError, match=r"65,536 tokens has 2\.62 GB .* 1\.25 GB .* the nearest is --gpus-per-node 30"
    ):
        wanted(node=machine("h800", 64, "400gbit", "400gbit", "500GB/s"))
    with pytest.raises(ConfigError, match=r"the nearest is --workload 48k"):
        wanted(node=machine("h800", 40, "400gbit", "400gbit", "500GB/s"))
