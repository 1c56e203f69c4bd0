"""One process of the cluster: `dualpath serve ROLE --config FILE`, and how a launcher starts its children.

As a child (--child) it reads its configuration as one line from stdin, which is then its lifeline, and writes its
address as one line to stdout when it is ready (common.children). Imports only what its role needs: a control
process stays small.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.children import Child, child_command, child_input, end_all, python_module, read_address
from common.config import Config, load_config, read_dumped_config
from common.config_layers import parse_settings
from common.errors import ConfigError, DualPathError, ErrorCode
from common.process import run_service
from common.service import Service
from common.types import Role

CLASSES = {
    Role.SCHEDULER: "services.scheduler.service:Scheduler",
    Role.STORAGE_GATEWAY: "services.storage_gateway.service:StorageGateway",
    Role.PREFILL: "services.prefill.service:PrefillEngine",
    Role.DECODE: "services.decode.service:DecodeEngine",
    Role.TRAFFIC_MANAGER: "services.traffic_manager.service:TrafficManager",
    Role.FRONTEND: "services.frontend.service:Frontend",
}
ENGINES = (Role.PREFILL, Role.DECODE)


def main(arguments: list[str]) -> int:
    """Run one process until it is told to end; its exit status."""
    parser = argparse.ArgumentParser(prog="dualpath serve", description="Run one process of a cluster.")
    parser.add_argument("role", choices=[role.value for role in Role], metavar="ROLE", help=", ".join(Role))
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    parser.add_argument("--name", help="unique in the cluster; default: ROLE@HOST")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override one field (scheduler.alpha=1000)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    role = Role(options.role)
    name = options.name or f"{role.value}@{socket.gethostname()}"
    try:
        if options.child:
            return serve(role, name, read_dumped_config(sys.stdin.buffer.readline().decode()), *_take_pipes())
        return serve(role, name, _with_model(load_config(options.config, parse_settings(options.set)), role))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def serve(
    role: Role, name: str, config: Config, ready_fd: int | None = None, lifeline_fd: int | None = None
) -> int:
    """Run the service of a role, an engine together with its traffic manager."""
    if role in ENGINES:
        # Read when torch is loaded. Compute threads that spin while they wait take the cores of every other engine of
        # this host: with three engines on two cores everything becomes five times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    module, _, attribute = CLASSES[role].partition(":")
    service_class: Callable[..., Service] = getattr(importlib.import_module(module), attribute)
    if role not in ENGINES:
        return run_service(lambda: service_class(config, name), config.log, ready_fd, lifeline_fd)
    traffic_manager = TrafficManagerChild(config, name)
    return run_service(lambda: traffic_manager.attend(service_class), config.log, ready_fd, lifeline_fd)


class TrafficManagerChild:
    """An engine's traffic manager, a process of its own. The two live and die together."""

    def __init__(self, config: Config, engine: str) -> None:
        network = config.network.model_copy(update={"node": config.network.node or engine})
        self._config = config.model_copy(update={"network": network})
        self._name = engine

    def attend(self, engine_class: Callable[..., Service]) -> Service:
        """The engine, which starts its traffic manager with start()."""
        self._engine = engine_class(self._config, self._name, self.start)
        return self._engine

    async def start(self) -> str:
        """Start it and return its control endpoint. It ends after the engine; if it ends before, the engine fails.
        ConfigError if it does not become ready."""
        name, health = f"{self._name}.tm", self._config.health.of_traffic_manager
        given = child_input(self._config.model_copy(update={"health": health}))
        child = Child(name, child_command(Role.TRAFFIC_MANAGER, name), first_line=given, session=False)
        self._engine.companions.push_async_callback(end_all, [child], self._config.timeouts.drain_s)
        address = await read_address(child, self._config.timeouts.register_s)
        self._engine.spawn(self._watch(child), "traffic manager", essential=True)
        return str(address["control"])

    async def _watch(self, child: Child) -> None:
        status = await child.ended()
        raise DualPathError(ErrorCode.ENGINE_LOST, f"the traffic manager of {self._name} ended with status {status}")


def _take_pipes() -> tuple[int, int]:
    """(ready, lifeline): stdout and stdin as they were handed to us. What prints goes to the log from now on."""
    ready, lifeline = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return ready, lifeline


def _with_model(config: Config, role: Role) -> Config:
    """config with the model as a directory and its digest known, for every role that looks at it. A profile is known
    by its name."""
    if role is Role.SCHEDULER or config.model.profile or (Path(config.model.path).is_dir() and config.model.digest):
        return config
    if not config.model.path:
        raise ConfigError("model.path is not set: name a model directory, a hub id or a profile in the configuration")
    command = python_module("services.launcher.prepare_model", "resolve", config.model.path)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    model = config.model.model_copy(update=json.loads(done.stdout.splitlines()[-1]))
    return config.model_copy(update={"model": model})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
