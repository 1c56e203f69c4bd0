"""Limits and clocks of this host: memory, locked memory, open files, time, ports."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.config import Config, EngineConfig, endpoint_host
from common.transport.memory import Memory
from services.launcher.doctor.check import Check, Level, judged, show_bytes

#: Descriptors beyond those of pending requests: peers, files, pipes.
SPARE_FILES = 512
#: What is kept for everything that is no KV.
SPARE_BYTES = 1 << 30
SLEEP_S, SLEEPS = 0.001, 30
#: Beyond this an event loop's timers are no use for transfers.
LATE_S = 0.002
GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter", "uml")
_STA_UNSYNC, _STATUS_AT, _TIMEX_BYTES = 0x40, 40, 256
NO_LIMIT = resource.RLIM_INFINITY


def engine_bytes(engine: EngineConfig) -> int:
    """Shared memory of an engine and its traffic manager."""
    return engine.buffer + engine.device_memory


# -- memory --


def read_available_bytes() -> int:
    """Of memory, with a limit of the container."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        left = available if limit == "max" else int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return max(0, min(available, left))


def judge_memory(available: int, config: Config) -> Check:
    needs = {"prefill": engine_bytes(config.prefill), "decode": engine_bytes(config.decode)}
    largest, both = max(needs.values()) + SPARE_BYTES, sum(needs.values()) + SPARE_BYTES
    told = ", ".join(f"{role} {show_bytes(num_bytes)}" for role, num_bytes in needs.items())
    return judged(
        "memory",
        f"{show_bytes(available)} available; buffer and device memory of an engine: {told}",
        (available < largest, Level.FAIL, "lower prefill.buffer, decode.buffer or their device_memory, or free memory"),
        (
            available < both,
            Level.WARN,
            "enough for one engine; `dualpath up` needs both: lower buffer or device_memory",
        ),
    )


def check_shared_memory() -> Check:
    """Regions are memory files, which a sandbox may forbid."""
    try:
        Memory.create("doctor", 4096).close()
    except OSError as error:
        return Check(
            "shared memory",
            Level.FAIL,
            f"memfd_create: {error.strerror}",
            "allow memfd_create (seccomp): every region is a memory file",
        )
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return judged(
        "shared memory",
        f"memory files can be made; /dev/shm has {show_bytes(size)}",
        (size < 256 << 20, Level.WARN, "only `loadgen` stores blocks in /dev/shm: docker run --shm-size 4g"),
    )


# -- limits --


def judge_memlock(limit: int, config: Config, has_rdma: bool) -> Check:
    """limit: bytes, or NO_LIMIT."""
    kind = config.network.transport
    needed = max(engine_bytes(config.prefill), engine_bytes(config.decode))
    wanted = kind == "verbs" or (kind == "auto" and has_rdma)
    lacks = wanted and limit != NO_LIMIT and limit < needed
    shown = "unlimited" if limit == NO_LIMIT else show_bytes(limit)
    return judged(
        "memlock",
        f"{shown}; " + (f"RDMA locks {show_bytes(needed)} of an engine" if wanted else "not needed without RDMA"),
        (
            lacks,
            Level.FAIL,
            "ulimit -l unlimited (LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)",
        ),
    )


def judge_open_files(limit: int, config: Config) -> Check:
    """limit: the hard one, to which every process of the cluster raises its own."""
    needed = config.frontend.max_pending + SPARE_FILES
    return judged(
        "open files",
        f"{'unlimited' if limit == NO_LIMIT else limit}; {config.frontend.max_pending} pending requests need {needed}",
        (
            limit != NO_LIMIT and limit < needed,
            Level.FAIL,
            f"ulimit -Hn {2 * needed} (LimitNOFILE), or lower frontend.max_pending",
        ),
    )


# -- time --


@dataclass(frozen=True, slots=True)
class Clock:
    """synchronised: None if the kernel does not say. late_s: median delay of a sleep."""

    synchronised: bool | None
    source: str
    late_s: float


def read_clock() -> Clock:
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        answered = ctypes.CDLL(None).adjtimex(buffer) >= 0  # changes nothing: its modes are 0
    except (OSError, AttributeError):
        answered = False
    status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], "little")
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = "unknown"
    late = []
    for _ in range(SLEEPS):
        begun = time.perf_counter()
        time.sleep(SLEEP_S)
        late.append(time.perf_counter() - begun - SLEEP_S)
    return Clock(not status & _STA_UNSYNC if answered else None, source, statistics.median(late))


def judge_clock(clock: Clock) -> Iterator[Check]:
    """Deadlines are of each process's monotonic clock; logs and traces of several hosts are put together by the time
    of day."""
    told = {True: "synchronised", False: "not synchronised", None: "synchronisation unknown"}[clock.synchronised]
    yield judged(
        "clock",
        f"{told}; source {clock.source}",
        (clock.synchronised is False, Level.WARN, "run chrony or ntpd: logs and traces of hosts are put side by side"),
        (
            clock.source not in (*GOOD_CLOCKS, "unknown"),
            Level.WARN,
            "reading this clock is slow: see /sys/devices/system/clocksource/clocksource0/available_clocksource",
        ),
    )
    yield judged(
        "timers",
        f"a sleep of {SLEEP_S * 1e3:g} ms is {clock.late_s * 1e6:.0f} us late",
        (
            clock.late_s > LATE_S,
            Level.WARN,
            "the CPUs are overloaded, or sleep deeply: nothing is as fast as it could be",
        ),
    )


# -- ports --


def listeners(config: Config) -> Iterator[tuple[str, str, int]]:
    """(field, host, port) of what the configuration gives a fixed port."""
    port = config.scheduler.control.rpartition(":")[2]
    if port.isdigit() and port != "0":
        yield "scheduler.control", endpoint_host(config.scheduler.control), int(port)
    if config.frontend.port:
        yield "frontend.port", config.frontend.host, config.frontend.port
    if config.health.port:
        yield "health.port", config.health.host, config.health.port


def try_port(host: str, port: int) -> int:
    """0 if it can be had, else the errno."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(found[0], found[1]) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[4])
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def judge_port(field: str, host: str, port: int, failure: int) -> Check:
    there = f"{host}:{port}"
    if failure == errno.EADDRNOTAVAIL and field == "scheduler.control":
        return Check(field, Level.OK, f"{there} is on another host")
    words = {
        0: f"{there} is free",
        errno.EADDRINUSE: f"{there} is taken",
        errno.EADDRNOTAVAIL: f"{host} is no address of this host",
    }
    found = words.get(failure, f"{there}: {os.strerror(failure)}")
    return judged(
        field,
        found,
        (failure == errno.EADDRINUSE, Level.WARN, "a cluster is up there, or somebody else: choose another port then"),
        (failure != 0, Level.FAIL, f"choose another {field}"),
    )


def check_host(config: Config, has_rdma: bool) -> Iterator[Check]:
    yield judge_memory(read_available_bytes(), config)
    yield check_shared_memory()
    yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], config, has_rdma)
    yield judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1], config)
    yield from judge_clock(read_clock())
    for field, host, port in listeners(config):
        yield judge_port(field, host, port, try_port(host, port))
