"""What `dualpath doctor` finds of network interfaces and RDMA devices, on hosts that are made up."""

from __future__ import annotations

import pytest

from common.transport.verbs.nics import Gid, Port
from services.launcher.doctor.check import Check
from services.launcher.doctor.network import (
    Interface,
    hardware_classes,
    judge_classes,
    judge_interface,
    kv_queue,
    parse_interface,
)
from services.launcher.doctor.rdma import judge_rdma, transport_check
from tests.doctor_support import FAIL, OK, WARN, configured

# -- network --

ETH = Interface("eth1", ("10.0.0.7", "fe80::1"), 9000, True)
LO = Interface("lo", ("127.0.0.1", "::1"), 65536, True, loopback=True)


def test_interfaces_are_read_as_ip_tells_them():
    entry = {
        "ifname": "eth1",
        "flags": ["BROADCAST", "UP"],
        "mtu": 9000,
        "addr_info": [{"family": "inet", "local": "10.0.0.7"}, {"family": "inet6", "local": "fe80::1"}, {}],
    }
    assert parse_interface(entry) == ETH


@pytest.mark.parametrize(
    ("address", "interface", "level"),
    [
        ("10.0.0.7", ETH, OK),
        ("127.0.0.9", LO, OK),
        ("localhost", LO, OK),
        ("10.0.0.8", ETH, FAIL),
        ("10.0.0.7", Interface("eth1", ("10.0.0.7",), 9000, False), FAIL),
        ("10.0.0.7", Interface("eth1", ("10.0.0.7",), 576, True), WARN),
    ],
)
def test_addresses_must_be_of_this_host(address, interface, level):
    check = judge_interface("network.cnic", address, [LO, interface])
    assert check.level is level and (level is OK or check.fix)


KV_FILTER = {"options": {"flowid": "1:20", "match": {"value": "200000", "mask": "fc0000", "offmask": "", "off": 0}}}


@pytest.mark.parametrize(
    ("qdiscs", "filters", "queue"),
    [
        ([{"kind": "htb", "root": True, "options": {}}], [{"kind": "u32"}, KV_FILTER], "class 1:20"),
        ([{"kind": "noqueue", "root": True, "options": {}}], [], ""),
        ([{"kind": "ets", "root": True, "options": {"priomap": [0, 1, 1, 0, 0, 0, 0, 0]}}], [], "band 1 of ets"),
        ([{"kind": "prio", "root": True, "options": {"priomap": [1, 2, 2, 2, 1, 2, 2, 2]}}], [], ""),
        (
            [],
            [{"options": {"flowid": "1:20", "match": {"value": "b80000", "mask": "fc0000", "off": 0}}}],
            "",
        ),
    ],
)
def test_queues_that_tell_kv_apart(qdiscs, filters, queue):
    assert kv_queue(qdiscs, filters) == queue


def test_hardware_classes_need_two_classes_for_the_two_code_points():
    ets = {"prio_tc": [0, 1, 2, 3, 2, 2, 2, 2]}
    apart = {"dscp_prio": [[46, 0], [0, 1], [8, 2]]}
    assert hardware_classes(apart, ets) == "traffic class 2, collectives in 0"
    assert hardware_classes({"dscp_prio": [[46, 4], [8, 2]]}, ets) == "", "both in class 2"
    assert hardware_classes({"dscp_prio": [[8, 2]]}, ets) == ""
    assert hardware_classes({}, {}) == ""


def test_a_network_without_classes_is_a_warning_with_the_command():
    assert judge_classes(ETH, "class 1:20", "").level is OK
    assert judge_classes(LO, "", "").level is OK
    check = judge_classes(ETH, "", "")
    assert check.level is WARN and "dualpath qos linux --dev eth1" in check.fix


# -- RDMA --

PORT = Port(
    "rxe0", 1, True, True, 4096, 0, (Gid(0, "fe80::1", "RoCE v2"), Gid(1, "::ffff:10.0.0.7", "RoCE v2")), ("10.0.0.7",)
)


def rdma(transport: str, ports: list[Port], broken: str = "", **fields: object) -> list[Check]:
    config = configured(
        network__transport=transport, network__snic="rxe0", network__cnic="rxe0", security__curve_dir="/keys", **fields
    )
    checks = list(judge_rdma(config, ports, broken))
    return [*checks, transport_check(config, checks)]


def test_rdma_as_it_should_be():
    checks = rdma("verbs", [PORT])
    assert [check.level for check in checks] == [OK] * 4
    assert "GID 1 (10.0.0.7, RoCE v2), path MTU 4096" in checks[1].found
    assert checks[-1].found == "verbs, as configured"
    assert "verbs between hosts" in rdma("auto", [PORT])[-1].found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"network__rdma__gid_index": 7}, "gid_index 7 does not exist"),
        ({"network__rdma__mtu": 4096}, "is more than"),
    ],
)
def test_what_rdma_cannot_do_fails_for_verbs_and_is_tcp_for_auto(fields, reason):
    """A GID that does not exist, an MTU that the port does not take."""
    small = Port("rxe0", 1, True, True, 1024, 0, PORT.gids, PORT.addresses)
    for transport, level in (("verbs", FAIL), ("auto", WARN)):
        checks = rdma(transport, [small], **fields)
        assert [check.level for check in checks[1:3]] == [level, level]
        assert all(reason in check.found for check in checks[1:3])
    assert "tcp between hosts, for want of a usable RDMA device" in checks[-1].found


def test_no_device_fails_where_verbs_is_wanted():
    assert rdma("verbs", [])[0].level is FAIL
    assert [check.level for check in rdma("tcp", [])] == [OK, OK]
    assert "tcp between hosts" in rdma("auto", [])[-1].found
    broken = rdma("auto", [], "RDMA needs pyverbs")
    assert broken[0].level is WARN and broken[0].found == "RDMA needs pyverbs"
    assert rdma("verbs", [], "RDMA needs pyverbs")[0].level is FAIL
