"""Running ip, tc and nsenter, and what they need of the machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

from common.errors import ConfigError
from compose.fabric.shaping import classify, shape

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
INSTEAD = "without a fabric, network.snic_rate and cnic_rate pace NICs in user space"
KILL_POLL_S, KILL_WAIT_S = 0.02, 10.0


def batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Many commands of ip or tc in one process, up to the first that fails. ConfigError with what it says."""
    command = [tool, *(["-netns", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False)
    if done.returncode:
        number = re.search(r"-:(\d+)\s*$", done.stderr)
        line = lines[int(number[1]) - 1] if number else ""
        where = namespace or "the machine itself"
        raise ConfigError(f"{tool} {line!r} in {where}: {' '.join(done.stderr.split())}")


def output(*command: str) -> str:
    """What a command prints. ConfigError if it fails."""
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def inside(namespace: str) -> list[str]:
    """In front of a command: run it in the namespace, as the same process."""
    return ["nsenter", f"--net=/run/netns/{namespace}", "--"]


def set_kernel(namespace: str, settings: dict[str, str]) -> None:
    """Write under /proc/sys/net as the namespace sees it."""
    script = "\n".join(f"echo {value} > /proc/sys/net/{name}" for name, value in settings.items())
    output(*inside(namespace), "sh", "-ec", script)


def namespaces(prefix: str) -> list[str]:
    """Those that exist, of a prefix."""
    names = [line.split()[0] for line in output("ip", "netns", "list").splitlines() if line]
    return sorted(name for name in names if name.startswith(prefix))


def kill_all(namespace: str) -> None:
    """SIGKILL every process in a namespace, however many it starts meanwhile; returns once none is left (bounded)."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        pids = [int(pid) for pid in output("ip", "netns", "pids", namespace).split()]
        if not [pid for pid in pids if pid != os.getpid()]:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_POLL_S)


def missing() -> str:
    """Why no fabric can be made here, as one line; empty if one can."""
    if os.geteuid() != 0:
        return f"shaped network namespaces need root ({INSTEAD})"
    for tool, package in PACKAGES.items():
        if shutil.which(tool) is None:
            return f"shaped network namespaces need the command {tool}: install {package} ({INSTEAD})"
    try:
        _try_kernel(f"dualpathprobe{os.getpid()}")
    except ConfigError as error:
        return f"this kernel or container does not allow shaped network namespaces ({INSTEAD}): {error}"
    return ""


def check() -> None:
    """ConfigError if no fabric can be made here."""
    if reason := missing():
        raise ConfigError(reason)


def _try_kernel(namespace: str) -> None:
    """Use each thing once that a fabric is made of."""
    batch("ip", [f"netns add {namespace}"])
    try:
        batch("ip", ["link add snic type veth peer name cnic", "link add switch type bridge"], namespace)
        batch("tc", [*shape("cnic", "cnic", "tx", 1_000_000), classify("cnic", True)], namespace)
        output(*inside(namespace), "true")
    finally:
        batch("ip", [f"netns del {namespace}"])
