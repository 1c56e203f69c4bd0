"""Which of the container's addresses is on which network.

A container has the name `snic` on the storage network and `cnic` on the compute network, as every other one there does.
Asked for that name, the engine's DNS gives the addresses of all of them; the one that can be bound here is ours. So
neither subnets nor the order of interfaces has to be fixed, and containers of a service can be as many as one likes.
"""

from __future__ import annotations

import socket

from common.errors import ConfigError


def own_address(name: str) -> str:
    """This container's IPv4 address among those of a name. ConfigError if it has none."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError:
        found = set()
    own = sorted(address for address in found if is_own(address))
    if not own:
        raise ConfigError(
            f"this container is on no network where it is called {name}: give it that alias on one "
            f"(docker network connect --alias {name} NETWORK CONTAINER)"
        )
    return own[0]


def is_own(address: str) -> bool:
    """Whether an interface here has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
