"""Memory that processes share: its life, its limits, its grants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from fcntl import F_ADD_SEALS, F_SEAL_SHRINK, fcntl
from pathlib import Path

import pytest

from common.transport.memory import MAX_GRANTS, Memory, host_identity, owner_pid, populate

KEY = bytes(range(16))


@pytest.fixture
def memory():
    memory = Memory.create("test", 10_000)
    yield memory
    memory.close()


def test_what_one_writes_the_other_reads(memory: Memory) -> None:
    assert bytes(memory.view) == bytes(10_000)
    peer = Memory.open(memory.path, 10_000)
    peer.view[9_999] = 7
    assert memory.view[9_999] == 7
    assert len(peer.view) == peer.size == 10_000
    part = Memory.open(memory.path, 5_000)
    assert len(part.view) == 5_000
    part.close()
    peer.close()


def test_open_refuses_what_is_too_small_or_no_memory(memory: Memory, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="10000 bytes, not 10001"):
        Memory.open(memory.path, 10_001)
    for path in ("/etc/passwd", "/proc/self/mem", "/proc/1/fd/../mem", "/proc/1/fd/3\n", "", "/proc/٣/fd/1"):
        with pytest.raises(ValueError, match="not a memory path"):
            Memory.open(path, 1)
    (tmp_path / "file").write_bytes(bytes(100_000))
    with open(tmp_path / "file", "r+b") as file, pytest.raises((ValueError, OSError)):
        Memory.open(f"/proc/{os.getpid()}/fd/{file.fileno()}", 10)
    shrinkable = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinkable, 100_000)
    with pytest.raises(ValueError, match="fixed size"):
        Memory.open(f"/proc/{os.getpid()}/fd/{shrinkable}", 10)
    os.close(shrinkable)
    with pytest.raises(OSError):
        Memory.open("/proc/999999999/fd/3", 10)
    assert owner_pid(memory.path) == os.getpid()


def test_pages_that_are_populated_are_there_and_hold_what_they_held() -> None:
    memory = Memory.create("large", 1_000_000)
    memory.view[500_000] = 7
    assert os.stat(memory.path).st_blocks * 512 < 100_000
    populate(memory.view)
    assert os.stat(memory.path).st_blocks * 512 >= 1_000_000
    assert memory.view[500_000] == 7 and bytes(memory.view).count(0) == 999_999
    memory.close()


def test_the_size_is_fixed(memory: Memory) -> None:
    fd = int(memory.path.rpartition("/")[2])
    for size in (0, 5_000, 1_000_000):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)


def test_close_is_idempotent_and_refuses_while_a_view_is_held() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = Memory.create("test", 100)
    held = memory.view[10:20]
    with pytest.raises(BufferError):
        memory.close()
    held.release()
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_failed_creation_leaks_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Memory.create("test", 1 << 62)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_grants_are_given_taken_and_limited(memory: Memory) -> None:
    peer = Memory.open(memory.path, 10_000)
    with peer.writing(KEY) as granted:
        assert not granted
    with peer.writing(bytes(16)) as granted:
        assert not granted
    grant = memory.grant(KEY)
    with peer.writing(KEY) as granted:
        assert granted
        assert not memory.revoke(grant)  # a write has begun
        with Memory.open(memory.path, 1).writing(KEY) as late:
            assert not late
    assert memory.revoke(grant)
    with peer.writing(KEY) as granted:
        assert not granted
    grants = [memory.grant(bytes([i + 1]) * 16) for i in range(MAX_GRANTS)]
    assert sorted(grants) == list(range(MAX_GRANTS))
    with pytest.raises(ValueError, match="grants"):
        memory.grant(KEY)
    assert not any(memory.view)
    peer.close()


def test_a_grant_that_is_revoked_just_before_the_lock_is_none(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Memory.open(memory.path, 10_000)
    grant = memory.grant(KEY)
    lock = peer._lock

    def revoked_first(entry: int, kind: int) -> None:
        assert memory.revoke(grant)
        lock(entry, kind)

    monkeypatch.setattr(peer, "_lock", revoked_first)
    with peer.writing(KEY) as granted:
        assert not granted
        monkeypatch.undo()
    peer.close()


OWNER = """
import os, sys, time
from common.transport.memory import Memory
memory = Memory.create("doomed", 1 << 20)
memory.view[:3] = b"abc"
print(memory.path, flush=True)
time.sleep(60)
"""

WRITER = """
import sys, time
from common.transport.memory import Memory
memory = Memory.open(sys.argv[1], 10)
with memory.writing(bytes(range(16))) as granted:
    print(granted, flush=True)
    time.sleep(60)
"""


def test_kill_9_of_the_owner_frees_the_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        peer = Memory.open(path, 1 << 20)
        assert bytes(peer.view[:3]) == b"abc"
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert bytes(peer.view[:3]) == b"abc"  # ours until we let go
        peer.close()
        with pytest.raises(OSError):
            Memory.open(path, 1 << 20)
    assert not any("doomed" in name for name in os.listdir("/dev/shm"))


def test_kill_9_of_a_writer_lets_go_of_the_memory(memory: Memory) -> None:
    grant = memory.grant(KEY)
    with subprocess.Popen([sys.executable, "-c", WRITER, memory.path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "True"
        assert not memory.revoke(grant)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        assert memory.revoke(grant)


def test_host_identity_is_the_same_in_another_process() -> None:
    code = "from common.transport.memory import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert other.stdout.strip() == host_identity()
