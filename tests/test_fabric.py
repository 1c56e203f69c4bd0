"""Fabrics on paper: shapes, rates, addresses, commands, and who owns what is left of one."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import load_config
from common.errors import ConfigError
from compose.fabric import registry, shaping, system, topology
from compose.fabric.fabric import Fabric
from compose.fabric.layout import MAX_FABRICS, Layout, parse_rate, parse_shape, transmitter
from compose.fabric.registry import Holder

LAYOUT = Layout("run7", 3, 2, 4, 26_000_000, 200_000_000)


# -- what people write --


@pytest.mark.parametrize(("text", "shape"), [("2P4D", (2, 4)), ("1p1d", (1, 1)), (" 48P96D ", (48, 96))])
def test_shapes(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "2P", "4D2P", "2x4", "-1P2D", "2P4D8", "P4D", "0P4D"])
def test_what_is_no_shape_is_said_so(text):
    with pytest.raises(ConfigError, match="write, say, 2P4D"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("26MB", 26_000_000), ("26MB/s", 26_000_000), ("1.5MiB", 1_572_864), ("200000", 200_000)]
)
def test_rates_are_bytes_a_second(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "26Mbit", "-1", ""])
def test_what_is_no_rate_is_said_so(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "../etc"}, "letters a-z and digits"),
        ({"name": "a-b"}, "letters a-z and digits"),
        ({"prefill": 0}, "nodes of both kinds"),
        ({"prefill": 200, "decode": 51}, "nodes of both kinds"),
        ({"slot": MAX_FABRICS}, "take one down"),
        ({"snic_rate": 0}, "snic rate 0 bytes/s"),
        ({"cnic_rate": 20_000_000_000}, "cnic rate"),
    ],
)
def test_impossible_fabrics_are_refused(change, reason):
    fields = {"name": "x", "slot": 0, "prefill": 1, "decode": 1, "snic_rate": 10**6, "cnic_rate": 10**6}
    with pytest.raises(ConfigError, match=reason):
        Layout(**(fields | change))


# -- names and addresses --


def test_nodes_and_their_nics():
    assert LAYOUT.nodes == ["ctl", "store", "p0", "p1", "d0", "d1", "d2", "d3"]
    assert LAYOUT.shaped == ["p0", "p1", "d0", "d1", "d2", "d3"]
    assert (LAYOUT.address("p0", "snic"), LAYOUT.address("p0", "cnic")) == ("198.18.3.3", "198.19.3.3")
    with pytest.raises(ConfigError, match="store has no cnic"):
        LAYOUT.address("store", "cnic")
    with pytest.raises(ConfigError, match="no node 'p2' in fabric run7: it has ctl, store, p0"):
        LAYOUT.address("p2", "snic")


@example(100, 150, 0, 1)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, MAX_FABRICS - 1), st.integers(0, MAX_FABRICS - 1))
def test_no_address_is_given_twice_even_among_fabrics(prefill, decode, slot, other_slot):
    seen = []
    for number in {slot, other_slot}:
        layout = Layout("x", number, prefill, decode, 10**6, 10**6)
        seen += [layout.address(node, nic) for node in layout.nodes for nic in layout.nics(node)]
        seen += [layout.uplink("root"), layout.uplink("ctl")]
        link = ipaddress.ip_interface(f"{layout.uplink('root')}/30").network
        assert set(map(str, link.hosts())) == {layout.uplink("root"), layout.uplink("ctl")}
    assert len(seen) == len(set(seen))
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network("198.18.0.0/15") for address in seen)


def test_what_a_nic_transmits_is_shaped_on_its_node_and_what_it_receives_at_the_switch():
    assert transmitter(LAYOUT, "d1", "cnic", "tx") == ("dualpath-run7-d1", "cnic")
    assert transmitter(LAYOUT, "d1", "cnic", "rx") == ("dualpath-run7-net", "d1-cnic")


def test_device_names_fit_the_kernel():
    layout = Layout("x", MAX_FABRICS - 1, 1, 249, 10**6, 10**6)
    devices = [transmitter(layout, node, "cnic", "rx")[1] for node in layout.shaped] + [layout.uplink_device]
    assert max(map(len, devices)) <= 15


# -- what the processes of a node are told --


@pytest.mark.parametrize("node", LAYOUT.nodes)
def test_settings_are_a_valid_configuration_and_so_is_the_environment(node, monkeypatch):
    fabric = Fabric(LAYOUT)
    config = load_config(None, fabric.settings(node))
    assert config.network.node == node and config.network.transport == "tcp"
    assert config.scheduler.control == "tcp://198.19.3.1:5700"
    assert config.network.snic == LAYOUT.address(node, "snic")
    assert config.network.host == LAYOUT.address(node, "snic" if node == "store" else "cnic")
    assert (config.network.snic_rate, config.network.cnic_rate) == (0, 0), "the kernel shapes, nobody else"
    assert f"http://{config.frontend.host}:{config.frontend.port}" == fabric.url
    for name, value in fabric.environment(node).items():
        monkeypatch.setenv(name, value)
    assert load_config() == config


# -- commands --


def test_a_compute_nic_of_200_megabytes_a_second():
    """By hand: packets of up to 100 us (20,000 bytes); tx bucket 1 ms; queues of 20 ms; shares 99.9 and 0.1 %."""
    assert shaping.shape("cnic", "cnic", "tx", 200_000_000) == [
        "qdisc add dev cnic root handle 1: htb default 10",
        "class add dev cnic parent 1: classid 1:1 htb rate 200000000bps ceil 200000000bps "
        "burst 200000 cburst 200000 prio 0 quantum 20000",
        "class add dev cnic parent 1:1 classid 1:10 htb rate 199800000bps ceil 200000000bps "
        "burst 200000 cburst 200000 prio 0 quantum 20000",
        "class add dev cnic parent 1:1 classid 1:20 htb rate 200000bps ceil 200000000bps "
        "burst 200000 cburst 200000 prio 1 quantum 20000",
        "qdisc add dev cnic parent 1:10 handle 10: bfifo limit 4000000",
        "qdisc add dev cnic parent 1:20 handle 20: bfifo limit 4000000",
    ]


def test_a_storage_nic_has_one_class_and_two_frames_fit_whatever_the_rate():
    lines = shaping.shape("p0-snic", "snic", "rx", 1_000_000)
    assert lines == [
        "qdisc add dev p0-snic root handle 1: htb default 10",
        "class add dev p0-snic parent 1: classid 1:10 htb rate 1000000bps ceil 1000000bps "
        "burst 36000 cburst 36000 prio 0 quantum 18000",
        "qdisc add dev p0-snic parent 1:10 handle 10: bfifo limit 288000",
    ]


def test_a_new_rate_changes_what_is_there():
    for nic, direction in product(("snic", "cnic"), ("tx", "rx")):
        made = shaping.shape("x", nic, direction, 5_000_000)[1:]
        assert shaping.reshape("x", nic, direction, 5_000_000) == [line.replace(" add ", " change ") for line in made]


def test_kv_is_told_by_its_code_point():
    """CS1 is 8, so 0x20 in the byte whose two low bits are others'."""
    match = "filter replace dev cnic parent 1: protocol ip prio 1 handle 800::1 u32 match ip dsfield 0x20 0xfc flowid "
    assert shaping.classify("cnic", True) == match + "1:20"
    assert shaping.classify("cnic", False) == match + "1:10"


def test_the_store_reaches_the_scheduler_over_the_storage_network():
    assert any(
        line.startswith("route add 198.19.3.1 via 198.18.3.1 dev snic") for line in topology.node(LAYOUT, "store")
    )
    assert not any("via" in line for line in topology.node(LAYOUT, "p0"))


def test_counters_are_those_of_the_classes_queues():
    text = json.dumps(
        [
            {"kind": "noqueue", "handle": "0:", "dev": "lo", "bytes": 1},
            {"kind": "htb", "handle": "1:", "dev": "cnic", "bytes": 30, "root": True},
            {"kind": "bfifo", "handle": "10:", "dev": "cnic", "bytes": 10, "packets": 2},
            {"kind": "bfifo", "handle": "20:", "dev": "cnic", "bytes": 20, "packets": 3},
        ]
    )
    found = {(device, name): values["bytes"] for device, name, values in shaping.read_queues(text)}
    assert found == {("cnic", "high"): 10, ("cnic", "low"): 20}


# -- whose a fabric is --


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "DIRECTORY", tmp_path / "fabrics")
    return tmp_path / "fabrics"


def layout(name: str, slot: int = 0) -> Layout:
    return Layout(name, slot, 1, 1, 10**6, 10**6)


def test_a_fabric_is_its_makers_until_it_lets_go(records):
    with registry.exclusive():
        owner = registry.create(layout("mine"), keep=False)
        assert owner is not None
        assert registry.holder("mine") is Holder.ALIVE
        assert (registry.free_slot(), registry.load("mine")) == (1, layout("mine"))
        with pytest.raises(ConfigError, match="in use"):
            registry.create(layout("mine"), keep=False)
        os.close(owner)
        assert registry.holder("mine") is Holder.DEAD
        registry.remove("mine")
        assert (registry.names(), registry.free_slot()) == ([], 0)


def test_a_killed_maker_leaves_a_dead_fabric_behind(records):
    script = (
        "import os, signal, sys; from pathlib import Path; from compose.fabric import registry\n"
        "from compose.fabric.layout import Layout\n"
        f"registry.DIRECTORY = Path({str(records)!r})\n"
        "with registry.exclusive():\n"
        "    owner = registry.create(Layout('his', 0, 1, 1, 10**6, 10**6), keep=False)\n"
        "print('made', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    ) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == b"made\n"
        with registry.exclusive():
            assert registry.holder("his") is Holder.ALIVE
        maker.kill()
        maker.wait()
    with registry.exclusive():
        assert registry.holder("his") is Holder.DEAD


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_a_kept_fabric_is_nobodys_and_half_of_one_is_dead(records):
    with registry.exclusive():
        assert registry.create(layout("kept"), keep=True) is None
        assert registry.holder("kept") is Holder.NOBODY
        (records / "half").mkdir()
        assert registry.holder("half") is Holder.DEAD
        (records / "kept" / "layout.json").write_text('{"name": "kept", "slot": 700}')
        assert registry.holder("kept") is Holder.DEAD


def test_one_at_a_time(records):
    with registry.exclusive():
        lock = os.open(records / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


# -- where there can be none --


def test_who_is_not_root_is_told_what_to_do_instead(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"need root .*pace NICs in user space"):
        Fabric.up(1, 1, 10**6, 10**6)


def test_a_missing_command_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "need the command ip: install iproute2" in system.missing()


def test_what_the_kernel_refuses_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for tool in ("ip", "tc", "nsenter"):
        fake = tmp_path / tool
        fake.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not supported' >&2; exit 2\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "does not allow shaped network namespaces" in system.missing()
    assert "Operation not supported" in system.missing()
