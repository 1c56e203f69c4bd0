"""RDMA in tests: on cables between RDMA devices of this host, as tests/rdma/guest has them.

DUALPATH_RDMA_RAILS names them: "OWN,PEER OWN,PEER", the addresses of the two ends of each cable.
"""

from __future__ import annotations

import os

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
