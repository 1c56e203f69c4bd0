"""What `dualpath doctor` finds of limits, clocks, software and storage, on hosts that are made up."""

from __future__ import annotations

import errno
import socket

import pytest

from common.config import Config
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
from services.launcher.doctor.software import check_model, judge_device, judge_packages
from services.launcher.doctor.storage import Place, check_storage, file_system_of, judge_place, judge_speed, nearest
from tests.doctor_support import FAIL, OK, WARN, configured
from tests.models import tiny_model

GIB = 1 << 30

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
    assert level is OK or "ulimit -Hn 3072" in check.fix


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
