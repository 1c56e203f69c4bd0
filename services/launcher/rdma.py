"""The settings of a cluster on this host that moves its KV by RDMA."""

from __future__ import annotations

from pathlib import Path

import zmq.auth

from common.config import load_config
from common.errors import ConfigError
from common.transport.verbs.device import find_ports


def rdma_settings(directory: Path) -> dict[str, str]:
    """Overrides of the configuration, by dotted name. The first RDMA interface is the storage NIC and the next one,
    where there is another, the compute NIC, unless the configuration names them; keys, without which nothing listens
    beyond loopback, are made in directory unless it has some. ConfigError if this host has no RDMA."""
    found = [port for port in find_ports() if port.active and port.addresses]
    if not found:
        raise ConfigError("--transport verbs needs an RDMA interface that is up: `rdma link` lists them")
    config = load_config()
    chosen = {"snic": found[0], "cnic": found[min(1, len(found) - 1)]}
    settings = {
        f"network.{name}": f"{port.device}:{port.number}"
        for name, port in chosen.items()
        if name not in config.network.model_fields_set
    }
    if not config.security.curve_dir:
        keys = directory / "keys"
        keys.mkdir(mode=0o700)
        zmq.auth.create_certificates(keys, "cluster")
        settings["security.curve_dir"] = str(keys)
    return settings
