"""What `dualpath qos` prints, against the paper's numbers and expectations by hand."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.config import QosConfig, load_config
from common.errors import ConfigError
from common.qos.infiniband import low_share, opensm
from common.qos.lanes import lanes
from common.qos.linux import linux, shape_of
from common.qos.roce import percents, roce
from common.transport.base import Intent
from common.transport.classes import CLASS_OF_INTENT, TRAFFIC_CLASSES
from services.launcher.commands import app

QOS = QosConfig()


def commands(lines: list[str]) -> list[str]:
    return [line for line in lines if line and not line.startswith("#")]


# -- lanes --


def test_collectives_are_alone_and_all_kv_yields():
    by_class = {name: lane for lane in lanes() for name in lane.classes}
    assert [lane.number for lane in lanes() if lane.low] == [2]
    for intent, known in CLASS_OF_INTENT.items():
        assert by_class[known.name].low == (intent is not Intent.MODEL_COLLECTIVE)
    assert by_class["collective"].classes == ("collective",)


def test_every_code_point_leads_to_the_lane_of_its_service_level():
    lane_of = {dscp: lane.number for lane in lanes() for dscp in lane.dscps}
    assert {known.dscp: known.service_level for known in TRAFFIC_CLASSES}.items() <= lane_of.items()
    assert lane_of[0] == 1, "what nobody marked is in nobody's way"


# -- InfiniBand --


def test_opensm_has_the_paper_s_numbers():
    assert commands(opensm(QOS)) == [
        "qos TRUE",
        "qos_max_vls 4",
        "qos_high_limit 240",
        "qos_vlarb_high 0:192,1:192,2:0,3:192",
        "qos_vlarb_low 0:192,1:192,2:64,3:192",
        "qos_sl2vl 0,1,2,3,2,2,2,2,2,2,2,2,2,2,2,2",
    ]


def test_what_is_not_ours_is_kept_out_of_the_collectives_lane():
    text = "\n".join(opensm(QOS))
    assert "#   qos-ulps\n#       default : 1\n#   end-qos-ulps" in text and "NCCL_IB_SL=0" in text


def test_kv_keeps_a_thousandth_of_a_link_full_of_collectives():
    """By hand: a packet of 4096 bytes for every 240 * 4096 of the high table; 64 of 256 of those are KV's."""
    assert low_share(QOS, 1) == pytest.approx(0.25 / 241)
    assert low_share(QOS, 3) == pytest.approx(0.1 / 241)
    assert 1 - low_share(QOS, 1) == pytest.approx(0.999, abs=1e-4)


def test_a_limit_that_would_starve_kv_is_refused(monkeypatch):
    monkeypatch.setenv("DUALPATH_NETWORK__QOS__HIGH_LIMIT", "255")
    with pytest.raises(ConfigError, match=r"network.qos.high_limit.*254"):
        load_config()


@given(st.integers(0, 254), st.integers(1, 255), st.integers(1, 255))
def test_kv_is_never_starved_and_never_first(limit, high, low):
    qos = QosConfig(high_limit=limit, high_weight=high, low_weight=low)
    assert 0 < low_share(qos, 3) < low_share(qos, 1) <= 0.5 * low / (low + high) + 1e-12
    lines = dict(line.split(" ", 1) for line in commands(opensm(qos)))
    assert "2:0" in lines["qos_vlarb_high"].split(",") and f"2:{low}" in lines["qos_vlarb_low"].split(",")


# -- RoCE --


def test_roce_by_hand():
    assert commands(roce(QOS, "eth2")) == [
        "dcb app replace dev eth2 dscp-prio 46:0 0:1 8:2",
        "dcb ets set dev eth2 willing off prio-tc 0:0 1:1 2:2 3:3 4:2 5:2 6:2 7:2 "
        "tc-tsa all:strict 0:ets 1:ets 2:ets 3:ets tc-bw all:0 0:33 1:33 2:1 3:33",
        "dcb pfc set dev eth2 prio-pfc all:off 0:on 1:on 2:on 3:on",
    ]
    text = "\n".join(roce(QOS, "eth2"))
    assert "mlnx_qos -i eth2 --trust dscp --dscp2prio set,46,0 --dscp2prio set,0,1 --dscp2prio set,8,2" in text
    assert "--prio_tc 0,1,2,3,2,2,2,2 --pfc 1,1,1,1,0,0,0,0" in text
    assert "--tsa ets,ets,ets,ets,strict,strict,strict,strict --tcbw 33,33,1,33,0,0,0,0" in text
    assert "NCCL_IB_TC=184" in text  # DSCP 46 in the traffic class byte


@given(st.floats(0.5, 0.9999))
def test_percents_sum_to_a_hundred_and_kv_has_the_least(share):
    shares = percents(QosConfig(high_share=share))
    low = shares.pop(2)
    assert low + sum(shares) == 100 and low >= 1
    assert max(shares) - min(shares) <= 1 and low == max(1, round(100 * (1 - share)))


# -- Linux --


def test_linux_with_a_rate_by_hand():
    """25 Gbit/s are 3,125,000,000 bytes/s: segments of 64 KiB, bursts of 1 ms, queues of 20 ms, KV 0.1 %."""
    assert commands(linux(QOS, "eth1", 3_125_000_000, 1500)) == [
        "tc qdisc del dev eth1 root 2>/dev/null || true  # whatever it had before",
        "ip link set dev eth1 gso_max_size 65536",
        "tc qdisc add dev eth1 root handle 1: htb default 10",
        "tc class add dev eth1 parent 1: classid 1:1 htb rate 3125000000bps ceil 3125000000bps "
        "burst 3125000 cburst 3125000 prio 0 quantum 65536",
        "tc class add dev eth1 parent 1:1 classid 1:10 htb rate 3121875000bps ceil 3125000000bps "
        "burst 3125000 cburst 3125000 prio 0 quantum 65536",
        "tc class add dev eth1 parent 1:1 classid 1:20 htb rate 3125000bps ceil 3125000000bps "
        "burst 3125000 cburst 3125000 prio 1 quantum 65536",
        "tc qdisc add dev eth1 parent 1:10 handle 10: bfifo limit 62500000",
        "tc qdisc add dev eth1 parent 1:20 handle 20: bfifo limit 62500000",
        "tc filter add dev eth1 parent 1: protocol ip prio 1 u32 match ip dsfield 0x20 0xfc flowid 1:20",
        "tc filter add dev eth1 parent 1: protocol ipv6 prio 2 u32 match ip6 priority 0x20 0xfc flowid 1:20",
    ]


def test_linux_without_a_rate_shares_out_what_the_nic_sends():
    """Priorities 1 and 2 are background's and KV's; 9,000 bytes of them for 8,991,000 of the others."""
    _, first, *filters = commands(linux(QOS, "eth1", None, 1500))
    assert first == (
        "tc qdisc add dev eth1 root handle 1: ets bands 2 quanta 8991000 9000 priomap 0 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0"
    )
    assert [line.split()[-1] for line in filters] == ["1:2", "1:2"]


@given(st.integers(100_000, 10**10), st.sampled_from([576, 1500, 9000]))
def test_a_shape_holds_what_it_must(rate, mtu):
    shape = shape_of(rate, mtu)
    assert 2 * mtu <= shape.segment <= max(65536, 2 * mtu)
    assert shape.burst >= 2 * shape.segment and shape.queue >= 16 * shape.segment


# -- the command --


@pytest.mark.parametrize(
    ("arguments", "word"),
    [("ib", "qos_vlarb_low"), ("roce --dev eth2", "dcb pfc set dev eth2"), ("linux --dev b0 --rate 1gbit", "htb")],
)
def test_the_command_prints_and_explains(arguments, word):
    told = CliRunner().invoke(app, ["qos", *shlex.split(arguments)])
    assert told.exit_code == 0 and word in told.stdout
    assert told.stdout.startswith("# "), "it says what it is for"


def test_weights_come_from_the_configuration(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[network.qos]\nhigh_limit = 24\nhigh_share = 0.99\n")
    ib = CliRunner().invoke(app, ["qos", "ib", "--config", str(file)]).stdout
    assert "qos_high_limit 24\n" in ib and "KV keeps 1.00%" in ib
    shaped = CliRunner().invoke(app, ["qos", "linux", "--rate", "8gbit", "--config", str(file)]).stdout
    assert "rate 990000000bps ceil 1000000000bps" in shaped


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("linux --dev 'eth0; reboot'", "no network interface"), ("linux --rate fast", "--rate 'fast' is not a rate")],
)
def test_what_does_not_belong_into_a_script_is_refused(arguments, reason):
    told = CliRunner().invoke(app, ["qos", *shlex.split(arguments)])
    assert told.exit_code == 2 and reason in told.stderr
