"""What the verbs transport decides without a NIC: places, windows, lists of work requests, refusals, falling back."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import struct
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import NetworkConfig, RdmaConfig, load_config
from common.errors import ConfigError
from common.metrics import Metrics
from common.transport.verbs.control import Ask, ControlStream, EndOfStream, Hello, QueuePairAddress
from common.transport.verbs.device import _refused_registration
from common.transport.verbs.dmabuf import take_over
from common.transport.verbs.listener import refusal
from common.transport.verbs.mover import VerbsMover
from common.transport.verbs.nics import Gid, Place, Port, choose
from common.transport.verbs.window import Window
from common.transport.verbs.work import LIST_WRITES, Flags, WorkList
from common.wire import PROTOCOL_VERSION
from services.launcher import rdma
from tests.transport_support import end

LINK_LOCAL = Gid(0, "fe80:0000:0000:0000:0242:acff:fe11:0002", "RoCE v2")
OLD = Gid(1, "0000:0000:0000:0000:0000:ffff:0a07:0101", "RoCE v1")
NEW = Gid(2, "0000:0000:0000:0000:0000:ffff:0a07:0101", "RoCE v2")
SECOND = Gid(5, "0000:0000:0000:0000:0000:ffff:0a07:0201", "RoCE v2")


def _port(device: str = "mlx5_0", *gids: Gid, **other: Any) -> Port:
    gids = gids or (LINK_LOCAL, OLD, NEW)
    values: dict[str, Any] = {"number": 1, "active": True, "ethernet": True, "mtu": 4096, "lid": 0}
    values |= {"gids": gids, "addresses": tuple(dict.fromkeys(gid.address for gid in gids))}
    return Port(device, **(values | other))


# ---- places ----------------------------------------------------------------------------------------------------------


def test_the_gid_of_an_address_is_the_roce_v2_one_whatever_its_index() -> None:
    ports = [_port("mlx5_1", SECOND), _port()]
    place = choose("10.7.1.1", ports)
    assert (place.port.device, place.gid, place.address, place.mtu) == ("mlx5_0", NEW, "10.7.1.1", 4096)
    assert choose("10.7.2.1", ports).gid is SECOND


def test_a_device_stands_for_its_first_routable_address() -> None:
    ports = [_port(), _port("mlx5_1", SECOND), _port("mlx5_1", SECOND, number=2, active=False)]
    assert choose("mlx5_0", ports).gid is NEW
    assert choose("mlx5_0", ports).address == "10.7.1.1"
    assert choose("mlx5_1", ports).port.number == 1
    with pytest.raises(ConfigError, match="down"):
        choose("mlx5_1:2", ports)


def test_an_infiniband_port_is_found_by_its_ipoib_interface() -> None:
    gid = Gid(0, "fe80:0000:0000:0000:506b:4b03:00cb:1122", "IB")
    port = _port("mlx5_2", gid, ethernet=False, lid=7, addresses=("10.9.0.4",))
    for nic in ("10.9.0.4", "mlx5_2", "mlx5_2:1"):
        place = choose(nic, [_port(), port])
        assert (place.port.lid, place.gid, place.address) == (7, gid, "10.9.0.4")
    with pytest.raises(ConfigError, match="IPoIB"):
        choose("mlx5_2", [replace(port, addresses=())])


def test_overrides() -> None:
    place = choose("10.7.1.1", [_port()], gid_index=1, mtu=1024)
    assert (place.gid, place.mtu) == (OLD, 1024)


@pytest.mark.parametrize(
    ("nic", "ports", "index", "mtu", "fix"),
    [
        ("10.7.1.1", [], None, 0, "load its driver.*network.transport to tcp"),
        ("10.7.1.9", [_port()], None, 0, r"no RDMA device has the address 10.7.1.9: set .* to mlx5_0:1 \(.*10.7.1.1"),
        ("mlx5_9", [_port()], None, 0, "there is no RDMA device mlx5_9: set .* to mlx5_0:1"),
        ("10.7.1.1", [_port(active=False)], None, 0, "is down: bring mlx5_0:1 .* up"),
        ("10.7.1.1", [_port()], 9, 0, r"gid_index 9 does not exist .*2 \(10.7.1.1, RoCE v2\): set one of these"),
        ("10.7.1.1", [_port("mlx5_0", OLD)], None, 0, "no RoCE v2 GID for 10.7.1.1, only 1 .* or set network.rdma.gid"),
        ("10.7.1.1", [_port(mtu=1024)], None, 4096, "mtu 4096 is more than .* takes, 1024: lower it"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line_that_names_the_fix(
    nic: str, ports: list[Port], index: int | None, mtu: int, fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix) as refused:
        choose(nic, ports, index, mtu)
    assert "\n" not in str(refused.value)


# ---- flow control ----------------------------------------------------------------------------------------------------


@given(
    credits=st.integers(1, 5),
    places=st.integers(4, 9),
    every=st.integers(1, 4),
    steps=st.lists(st.integers(0, 99), max_size=60),
)
def test_a_window_lets_no_more_through_than_credits_and_the_send_queue_allow(
    credits: int, places: int, every: int, steps: list[int]
) -> None:
    """Against the plain list of what was posted, with the places of its signals."""
    window = Window(credits, places, every)
    signals: list[bool] = []
    acknowledged = over = free_to = 0
    for step in steps:
        match step % 4:
            case 0 if window.open:
                number, signalled = window.post()
                assert number == len(signals)
                signals.append(signalled)
                assert signals[-every:].count(True) == min(1, len(signals) // every)
            case 1 if True in signals[free_to:]:
                free_to += signals[free_to:].index(True) + 1
                window.sent()
            case 2:
                acknowledged += step // 4 % (len(signals) - acknowledged + 1)
                window.acknowledge(acknowledged)
            case 3:
                assert window.take_over() == acknowledged - over
                over = acknowledged
        assert window.waits_for_sent == (len(signals) - free_to == places)
        assert window.open == (len(signals) - acknowledged < credits and len(signals) - free_to < places)
        assert len(signals) - free_to <= places and len(signals) - acknowledged <= credits


def test_numbers_wrap_as_the_notices_do() -> None:
    window = Window(4, 8, 4)
    window._posted = window._sent = window._acknowledged = window._over = 2**32 - 2
    assert [window.post()[0] for _ in range(4)] == [2**32 - 2, 2**32 - 1, 0, 1]
    window.acknowledge(1)
    assert window.take_over() == 3 and window.open
    window.acknowledge(2)
    assert window.take_over() == 1


def test_a_window_takes_no_acknowledgement_of_what_was_not_sent() -> None:
    window = Window(4, 4, 2)
    window.post()
    with pytest.raises(ValueError, match="nothing"):
        window.sent()
    window.post()
    for wrong in (3, 2**31, 2**32 - 1):
        with pytest.raises(ValueError, match="not sent"):
            window.acknowledge(wrong)
    window.acknowledge(2)
    with pytest.raises(ValueError, match="not sent"):
        window.acknowledge(1)
    window.sent()
    with pytest.raises(ValueError, match="nothing"):
        window.sent()


# ---- work requests ---------------------------------------------------------------------------------------------------


class _Element:
    addr = length = lkey = 0


class _Request:
    """A SendWR as far as a list uses it."""

    def __init__(self) -> None:
        self.send_flags = self.imm_data = self.rkey = self.target = 0
        self.next: _Request | None = None
        self.element = _Element()

    def set_wr_rdma(self, rkey: int, target: int) -> None:
        self.rkey, self.target = rkey, target


FLAGS = Flags(inline=8, signalled=2, solicited=1)


def _work() -> WorkList:
    requests = [_Request() for _ in range(LIST_WRITES)]
    for request, following in pairwise(requests):
        request.next = following
    return WorkList(requests, [request.element for request in requests], FLAGS, 100)


def _chain(head: _Request | None) -> list[_Request]:
    chain = []
    while head is not None:
        chain.append(head)
        head = head.next
    return chain


@given(
    batches=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 200)),
                min_size=1,
                max_size=LIST_WRITES,
            ),
            st.integers(1, 3),
            st.integers(0, 2**32 - 1),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_list_that_is_posted_again_has_nothing_left_of_what_it_was(
    batches: list[tuple[list[tuple[int, int, int]], int, int, bool]],
) -> None:
    work = _work()
    for writes, key, notice, signalled in batches:
        chain = _chain(work.aim(np.array(writes, np.int64), key, 10 * key, notice, signalled))
        assert [(r.element.addr, r.target, r.element.length) for r in chain] == writes
        assert {(r.element.lkey, r.rkey) for r in chain} == {(key, 10 * key)}
        inline = 8 if max(length for *_, length in writes) <= 100 else 0
        assert [r.send_flags for r in chain] == [inline] * (len(writes) - 1) + [inline + 1 + 2 * signalled]
        assert chain[-1].imm_data == notice


# ---- connections -----------------------------------------------------------------------------------------------------

PLACE = Place(_port(), NEW, "10.7.1.1", 4096)
PAIR = QueuePairAddress(17, 4711, NEW.gid, 0, 4096, True)
HELLO = Hello(PROTOCOL_VERSION, "abc", 1, PAIR)


@pytest.mark.parametrize(
    ("hello", "fix"),
    [
        (Ask(bytes(16)), "expected Hello"),
        (replace(HELLO, version=99), "version 99 .* install one version everywhere"),
        (replace(HELLO, incarnation="abd"), "another one by now"),
        (replace(HELLO, traffic_class=3), "no traffic class 3"),
        (replace(HELLO, traffic_class=-1), "no traffic class -1"),
        (replace(HELLO, pair=replace(PAIR, mtu=1024)), "4096, yours is 1024: .* set network.rdma.mtu to 1024 on both"),
        (replace(HELLO, pair=replace(PAIR, ethernet=False)), "is RoCE, your device is InfiniBand: set snic and cnic"),
    ],
)
def test_connections_that_would_not_work_are_refused_with_the_fix(hello: object, fix: str) -> None:
    assert refusal(HELLO, "abc", PLACE) is None
    reason = refusal(hello, "abc", PLACE)
    assert reason is not None and re.search(fix, reason) and "\n" not in reason


def _framed(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", EndOfStream),
        (b"\x01\x00", EndOfStream),
        (struct.pack("<I", 50) + b"half", EndOfStream),
        (struct.pack("<I", 0xFFFFFFFF), ConnectionError),
        (struct.pack("<I", 4) + b"junk", ConnectionError),
        (_framed(msgpack.packb(["Ask", {"key": 5}])), ConnectionError),
        (_framed(msgpack.packb(["Ask", {"key": b"k"}]) + b"more"), ConnectionError),
    ],
)
async def test_what_is_no_message_ends_the_stream(raw: bytes, error: type[Exception]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(raw)
    reader.feed_eof()
    stream = ControlStream(reader, None)  # type: ignore[arg-type]
    with pytest.raises(error):
        await stream.receive()


# ---- without RDMA ----------------------------------------------------------------------------------------------------


def _mover(monkeypatch: pytest.MonkeyPatch, metrics: Metrics, required: bool) -> VerbsMover:
    """On a machine without pyverbs, whatever this one has."""
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    return VerbsMover("127.0.0.1", RdmaConfig(), {}, metrics, 1.0, required)


async def test_verbs_without_pyverbs_is_an_error_that_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"extra `rdma` .* libibverbs1 .* or set network.transport to tcp"):
        await _mover(monkeypatch, Metrics(), required=True).start()


async def test_auto_does_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics()
    mover = _mover(monkeypatch, metrics, required=False)
    await mover.start()
    (gauge,) = [name for name in metrics.snapshot() if name.startswith("rdma_fallback")]
    assert "needs pyverbs" in gauge and metrics.snapshot()[gauge] == 1
    assert "tcp instead" in "".join(capfd.readouterr())
    assert not mover.usable
    async with end("auto") as one:
        region, _ = one.region(10)
        assert not region.verbs and region.address


def test_memory_that_may_not_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("no")
    error.error_code = errno.ENOMEM  # type: ignore[attr-defined]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert "limit is 65536: raise it (ulimit -l unlimited" in str(_refused_registration(1 << 30, error))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "ulimit" not in str(_refused_registration(1 << 30, error))


def test_configuration() -> None:
    network = NetworkConfig.model_validate(
        {"transport": "verbs", "rdma": {"mtu": "1024", "gid_index": 3, "spin": True}}
    )
    assert network.rdma == RdmaConfig(mtu=1024, gid_index=3, spin=True)
    for wrong in ({"mtu": 1500}, {"gid_index": -1}, {"device": "x"}):
        with pytest.raises(ValueError):
            NetworkConfig.model_validate({"rdma": wrong})


def test_a_descriptor_is_taken_over_from_another_process() -> None:
    """How a traffic manager gets at what its engine has exported."""
    memory = os.memfd_create("exported")
    os.write(memory, b"of the device")
    own = take_over(os.getpid(), memory)
    try:
        assert own != memory and os.pread(own, 20, 0) == b"of the device"
    finally:
        os.close(own)
        os.close(memory)
    with pytest.raises(OSError):
        take_over(os.getpid(), 1 << 20)


# ---- a cluster on this host ------------------------------------------------------------------------------------------


def test_the_demo_takes_the_first_two_interfaces_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports = [_port("mlx5_9", active=False), _port(), _port("mlx5_1", SECOND)]
    monkeypatch.setattr(rdma, "find_ports", lambda: ports)
    settings = rdma.rdma_settings(tmp_path)
    assert settings.pop("security.curve_dir") == str(tmp_path / "keys")
    assert (tmp_path / "keys" / "cluster.key_secret").exists()
    assert settings == {"network.snic": "mlx5_0:1", "network.cnic": "mlx5_1:1"}
    config = load_config(overrides={**settings, "security.curve_dir": str(tmp_path / "keys")})
    assert config.network.snic == "mlx5_0:1"

    monkeypatch.setenv("DUALPATH_NETWORK__SNIC", "10.7.2.1")
    monkeypatch.setenv("DUALPATH_SECURITY__CURVE_DIR", str(tmp_path / "keys"))
    del ports[2]
    assert rdma.rdma_settings(tmp_path) == {"network.cnic": "mlx5_0:1"}
    ports.pop()
    with pytest.raises(ConfigError, match="needs an RDMA interface that is up"):
        rdma.rdma_settings(tmp_path)
