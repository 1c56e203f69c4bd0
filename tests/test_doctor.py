"""Every check of `dualpath doctor`, on hosts that are made up; and the command on this one."""

from __future__ import annotations

import errno
import json
import socket

import pytest
from typer.testing import CliRunner

from common.config import Config, load_config
from common.isolation.latency import Latency
from common.transport.verbs.nics import Gid, Port
from services.launcher.commands import app
from services.launcher.doctor import isolation
from services.launcher.doctor.check import Check, Level, healthy, show_bytes
from services.launcher.doctor.host import (
    NO_LIMIT,
    Clock,
    judge_clock,
    judge_memlock,
    judge_memory,
    judge_open_files,
    judge_port,
    listeners,
    read_available_bytes,
    read_clock,
    try_port,
)
from services.launcher.doctor.network import (
    Interface,
    hardware_classes,
    judge_classes,
    judge_interface,
    kv_queue,
    parse_interface,
)
from services.launcher.doctor.rdma import judge_rdma, transport_check
from services.launcher.doctor.software import check_model, judge_device, judge_packages
from services.launcher.doctor.storage import Place, check_storage, file_system_of, judge_place, judge_speed, nearest
from tests.models import tiny_model

GIB = 1 << 30
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


def configured(**fields: object) -> Config:
    return load_config(None, {name.replace("__", "."): value for name, value in fields.items()})


# -- what a check is --


def test_a_check_is_a_line_and_only_failures_are_unhealthy():
    bad = Check("memlock", FAIL, "8 MiB", "ulimit -l unlimited")
    assert str(bad) == "fail  memlock: 8 MiB -> ulimit -l unlimited"
    assert str(Check("clock", OK, "synchronised")) == "ok    clock: synchronised"
    assert healthy([Check("a", OK, ""), Check("b", WARN, "", "x")]) and not healthy([bad])


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 bytes"), (8 << 20, "8 MiB"), (3 * GIB // 2, "1.5 GiB"), (5 << 40, "5 TiB")]
)
def test_sizes(num_bytes, words):
    assert show_bytes(num_bytes) == words


# -- host --


@pytest.mark.parametrize(("available", "level"), [(2 * GIB - 1, FAIL), (2 * GIB, WARN), (int(2.75 * GIB), OK)])
def test_memory_must_hold_an_engine_and_should_hold_one_of_each(available, level):
    """By hand: 1 GiB of decode or 0.75 GiB of prefill, and 1 GiB to spare."""
    assert judge_memory(available, Config()).level is level


@pytest.mark.parametrize(
    ("transport", "has_rdma", "limit", "level"),
    [
        ("verbs", False, 8 << 20, FAIL),
        ("verbs", True, NO_LIMIT, OK),
        ("verbs", True, GIB, OK),
        ("auto", True, 8 << 20, FAIL),
        ("auto", False, 8 << 20, OK),
        ("tcp", True, 8 << 20, OK),
    ],
)
def test_memory_must_be_lockable_where_rdma_is_used(transport, has_rdma, limit, level):
    check = judge_memlock(limit, configured(network__transport=transport), has_rdma)
    assert check.level is level and ("ulimit -l unlimited" in check.fix) == (level is FAIL)


@pytest.mark.parametrize(("limit", "level"), [(256, FAIL), (1535, FAIL), (1536, OK), (NO_LIMIT, OK)])
def test_open_files_must_do_for_all_pending_requests(limit, level):
    """Case E11."""
    check = judge_open_files(limit, Config())
    assert check.level is level
    assert level is OK or "ulimit -n 3072" in check.fix


@pytest.mark.parametrize(
    ("clock", "levels"),
    [
        (Clock(True, "tsc", 60e-6), [OK, OK]),
        (Clock(None, "unknown", 60e-6), [OK, OK]),
        (Clock(False, "tsc", 60e-6), [WARN, OK]),
        (Clock(True, "hpet", 60e-6), [WARN, OK]),
        (Clock(True, "tsc", 4e-3), [OK, WARN]),
    ],
)
def test_clocks(clock, levels):
    assert [check.level for check in judge_clock(clock)] == levels


def test_the_ports_of_the_configuration():
    config = configured(scheduler__control="tcp://127.0.0.1:5700", frontend__port=0, health__port=9000)
    assert list(listeners(config)) == [
        ("scheduler.control", "127.0.0.1", 5700),
        ("health.port", "127.0.0.1", 9000),
    ]
    assert list(listeners(configured(scheduler__control="tcp://127.0.0.1:*", frontend__port=0))) == []


def test_a_port_that_is_taken_is_found_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert try_port("127.0.0.1", port) == errno.EADDRINUSE
    assert try_port("127.0.0.1", port) == 0
    assert try_port("203.0.113.9", 80) == errno.EADDRNOTAVAIL


@pytest.mark.parametrize(
    ("field", "failure", "level"),
    [
        ("frontend.port", 0, OK),
        ("frontend.port", errno.EADDRINUSE, WARN),
        ("frontend.port", errno.EACCES, FAIL),
        ("frontend.port", errno.EADDRNOTAVAIL, FAIL),
        ("scheduler.control", errno.EADDRNOTAVAIL, OK),
    ],
)
def test_ports(field, failure, level):
    assert judge_port(field, "10.0.0.1", 80, failure).level is level


def test_this_host_can_be_read():
    clock = read_clock()
    assert clock.source and -1e-3 < clock.late_s < 10
    assert 0 < read_available_bytes() < 1 << 50


# -- software --


def test_unmet_requirements_are_named_with_what_is_there():
    wanted = ["numpy>=1.26", "torch==2.13.0", "zmq-nonsense>=3", "pyverbs; extra == 'rdma'"]
    found = {"numpy": "2.1.0", "torch": "2.9.1"}
    check = judge_packages(wanted, found.get)
    assert check.level is FAIL and "torch==2.13.0 (found 2.9.1)" in check.found
    assert check.fix == "pip install 'torch==2.13.0' 'zmq-nonsense>=3'"
    good = judge_packages(wanted[:2], {**found, "torch": "2.13.0+cpu"}.get)
    assert good.level is OK and "torch 2.13.0+cpu, transformers missing" in good.found


def test_models(tmp_path):
    model = tiny_model(tmp_path)
    good = check_model(configured(model__path=str(model)))
    assert good.level is OK and "LlamaForCausalLM" not in good.found and "llama" in good.found
    (model / "tokenizer.json").unlink()
    bad = check_model(configured(model__path=str(model)))
    assert bad.level is FAIL and "no tokenizer.json" in bad.found
    assert check_model(configured(model__path="/nowhere")).level is FAIL
    assert check_model(configured(model__path="Qwen/Qwen3-0.6B")).level is OK
    assert check_model(configured(model__profile="ds-660b")).level is OK


def test_a_device_that_torch_cannot_use():
    model = configured(model__device="cuda:0").model
    assert judge_device(model, "").level is OK
    check = judge_device(model, "Torch not compiled with CUDA enabled")
    assert check.level is FAIL and "CUDA enabled" in check.found


# -- storage --

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:22 / /mnt rw - tmpfs tmpfs rw
24 23 0:23 / /mnt/shared\\040kv rw - nfs4 server:/kv rw
25 23 0:24 / /mnt rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/var/kv", "ext4"), ("/mnt", "overlay"), ("/mnt/shared kv/a", "nfs4"), ("/mntx", "ext4")],
)
def test_the_file_system_is_that_of_the_deepest_mount_and_the_last(tmp_path, path, kind):
    assert file_system_of(tmp_path.__class__(path), MOUNTS) == kind


def place(**changes: object) -> Place:
    fields = {"path": "/kv", "file_system": "xfs", "mode": 0o700, "own": True, "free_bytes": 1 << 40}
    return Place(**{**fields, "free_inodes": 10**9, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, [OK, OK]),
        ({"free_inodes": None}, [OK, OK]),
        ({"free_bytes": 1 << 20}, [FAIL, OK]),
        ({"free_bytes": GIB}, [WARN, OK]),
        ({"free_inodes": 100}, [WARN, OK]),
        ({"file_system": "tmpfs"}, [WARN, OK]),
        ({"mode": 0o777}, [OK, WARN]),  # case F14
    ],
)
def test_storage_places(changes, levels):
    assert [check.level for check in judge_place(place(**changes))] == levels


def test_a_slow_store_is_named():
    assert judge_speed(2e9).level is OK and judge_speed(20e6).level is WARN


def test_a_store_is_tried_where_it_would_be_made_and_nothing_is_left(tmp_path):
    config = configured(storage__path=str(tmp_path / "a" / "b"))
    assert nearest(tmp_path / "a" / "b") == tmp_path
    checks = {check.name: check for check in check_storage(config)}
    assert set(checks) == {"storage room", "storage access", "storage speed"}
    assert all(check.level is not FAIL for check in checks.values()), checks
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    (check,) = check_storage(configured(storage__path=str(file / "kv")))
    assert check.level is FAIL and "not a directory" in check.found


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


# -- isolation --


def measured(idle: float, same: float, own: float) -> dict[str, Latency]:
    values = zip(isolation.PHASES, (idle, same, own), strict=True)
    return {name: Latency(1000, value * 1e-6, 2 * value * 1e-6) for name, value in values}


@pytest.mark.parametrize(
    ("phases", "level", "word"),
    [
        (measured(131, 877, 141), OK, "under bulk of its class 6.7 x idle at p50, under KV 1.08 x"),
        (measured(131, 877, 700), FAIL, "under KV 5.34 x"),
        (measured(131, 300, 300), WARN, "2.3 x"),
    ],
)
def test_verdicts_of_isolation(phases, level, word):
    *_, verdict = isolation.judge_isolation(phases)
    assert verdict.level is level and word in verdict.found
    assert level is not FAIL or "dualpath qos" in verdict.fix


def test_mtus_of_two_hosts_must_be_the_same():
    assert isolation.judge_mtu(9000, 9000).level is OK and isolation.judge_mtu(0, 9000).level is OK
    assert isolation.judge_mtu(9000, 1500).level is FAIL


# -- the command --


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_lines_and_json():
    code, told, _ = run("--json")
    report = json.loads(told)
    assert {"packages", "memory", "memlock", "clock", "transport"} <= {check["name"] for check in report["checks"]}
    assert all(set(check) == {"name", "level", "found", "fix"} for check in report["checks"])
    assert all(check["fix"] for check in report["checks"] if check["level"] != "ok")
    assert (code, report["ok"]) == ((0, True) if code == 0 else (1, False))


def test_what_is_wrong_with_the_configuration_is_among_the_findings(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[network]\ncnik = '1'\n")
    code, told, _ = run("--config", str(file))
    assert code == 1 and "fail  network.cnik: no such field" in told
    code, _, error = run("--config", str(file), "--listen", "tcp://127.0.0.1:0")
    assert code == 2 and "network.cnik" in error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--listen", "tcp://127.0.0.1:1", "--peer", "tcp://127.0.0.1:1"], "give one of them"),
        (["--listen", "tcp://10.1.2.3:1"], "not loopback"),
        (["--listen", "nonsense"], "not an endpoint"),
    ],
)
def test_sides_of_a_measurement_that_cannot_be(arguments, reason):
    code, _, error = run(*arguments)
    assert code == 2 and reason in error


def test_a_transport_that_crosses_no_network_is_not_measured(monkeypatch):
    monkeypatch.setenv("DUALPATH_NETWORK__TRANSPORT", "shm")
    code, _, error = run("--listen", "tcp://127.0.0.1:0")
    assert code == 2 and "crosses no network" in error
