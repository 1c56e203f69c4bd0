"""RDMA in tests: on cables between RDMA devices of this host, as tests/rdma/guest has them.

DUALPATH_RDMA_RAILS names them: "OWN,PEER OWN,PEER", the addresses of the two ends of each cable.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

RAILS = [tuple(rail.split(",")) for rail in os.environ.get("DUALPATH_RDMA_RAILS", "").split()]
needs_rdma = [
    pytest.mark.rdma,
    pytest.mark.skipif(not RAILS, reason="no RDMA rails here: tests/rdma/guest pytest -m rdma"),
]
#: The transport as a parameter: its tests run where there are rails.
VERBS = pytest.param("verbs", marks=needs_rdma)


def ends(kind: str) -> tuple[str, str]:
    """Addresses for a writer and its peer."""
    if kind != "verbs":
        return "127.0.0.1", "127.0.0.1"
    own, peer = RAILS[0]
    return own, peer


@contextmanager
def pulled(address: str) -> Iterator[None]:
    """The cable of the interface with this address is out. Its routes, which go with it, are put back in the end."""
    interfaces = [line.split() for line in _ip("-o", "-4", "addr").splitlines()]
    name = next(words[1] for words in interfaces if words[3].startswith(f"{address}/"))
    routes = [
        line for line in _ip("-o", "route", "show", "table", "all", "dev", name).splitlines() if "local" not in line
    ]
    _ip("link", "set", name, "down")
    try:
        yield
    finally:
        _ip("link", "set", name, "up")
        for route in routes:
            if " table " in route:
                _ip("route", "replace", *route.split(), "dev", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
