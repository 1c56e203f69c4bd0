"""The image's entry point: `ROLE [ARGUMENT...]`, `keys`, `model`, or any other command as it is.

A role is served with the addresses of its container, through NICs with the rates that SNIC_RATE and CNIC_RATE name, if
they do, and with the model that `model` has put into its volume, unless the configuration names one.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from common.config import Config, load_config
from common.config_layers import ENV_PREFIX
from common.errors import ConfigError
from common.perf.units import parse_rate
from common.types import Role
from compose.container.addresses import own_address
from compose.container.health import GIVEN
from compose.container.shaping import device_of, shape_nic
from compose.fabric.layout import NICS, Nic

CONFIG = Path("/etc/dualpath/dualpath.toml")
#: What `model` has fetched, for everybody else: a configuration's section [model].
SERVED = Path("/models/served.toml")


def main(arguments: list[str]) -> int:
    """Replaces this process by the one that is asked for; returns only if that cannot be, or there is nothing to do."""
    try:
        command, environment = prepare(arguments, dict(os.environ))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if command:
        os.execvpe(command[0], command, environment)
    return 0


def prepare(arguments: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """(command, its environment). ConfigError if the container is not what it has to be."""
    task, *rest = arguments or [""]
    if task not in ("keys", "model", *Role):
        return arguments, environment
    config = load_config(CONFIG)
    if task == "keys":
        return ["dualpath", "keys", config.security.curve_dir, *rest], environment
    if task == "model":
        model = ["--model", environment["MODEL"]] if environment.get("MODEL") else []
        return [] if names_model(config) else ["dualpath", "fetch", *model, "--out", str(SERVED)], environment
    Path(GIVEN).unlink(missing_ok=True)  # those of the container's last start
    addresses = {nic: own_address(nic) for nic in nics_of(Role(task))}
    for nic, address in addresses.items():
        if text := environment.get(f"{nic.upper()}_RATE"):
            shape_nic(device_of(address), nic, int(parse_rate(f"{nic.upper()}_RATE", text)))
    Path(GIVEN).write_text("\n".join(addresses.values()))
    settings = settings_of(Role(task), addresses, config)
    if task != Role.SCHEDULER and not names_model(config):
        settings |= served()
    variables = {f"{ENV_PREFIX}{name.replace('.', '__').upper()}": value for name, value in settings.items()}
    # from here on nobody gets CAP_NET_ADMIN from a file any more
    command = ["setpriv", "--no-new-privs", "dualpath", "serve", task, "--config", str(CONFIG), *rest]
    return command, variables | environment


def names_model(config: Config) -> bool:
    return bool(config.model.path or config.model.profile)


def nics_of(role: Role) -> tuple[Nic, ...]:
    """A front end moves no KV: it is on the compute network only, where the control plane is."""
    return ("cnic",) if role is Role.FRONTEND else NICS


def settings_of(role: Role, addresses: dict[Nic, str], config: Config) -> dict[str, str]:
    """Fields of the configuration, by dotted name, of a process with these addresses.

    The control plane is on the compute network: there everything but KV is of the high class (paper §5), while on the
    storage network a message would wait behind the KV that is read.
    """
    control = addresses["cnic"]
    settings = {"network.host": control, **{f"network.{nic}": address for nic, address in addresses.items()}}
    if role is Role.SCHEDULER:  # others find it by its name, which it cannot bind
        settings["scheduler.control"] = f"tcp://{control}:{config.scheduler.control.rpartition(':')[2]}"
    return settings


def served() -> dict[str, str]:
    """The model in the volume. ConfigError if none has been put there."""
    try:
        section = tomllib.loads(SERVED.read_text())["model"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        raise ConfigError(f"{SERVED} names no model: run the command `model` of this image first") from None
    return {f"model.{name}": str(value) for name, value in section.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
