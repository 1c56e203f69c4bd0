"""`dualpath qos`: what a fabric has to be told so that KV does not hold up model collectives, for people to apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from common.config import QosConfig, load_config
from common.errors import ConfigError
from common.perf.units import parse_rate
from services.launcher.console import ConfigFile, say

app = typer.Typer(
    no_args_is_help=True,
    help="Print the fabric's configuration for this project's traffic classes; nothing is changed.",
)
Device = Annotated[str, typer.Option("--dev", help="Network interface")]


@app.command("ib")
def ib_command(config: ConfigFile = None) -> None:
    """InfiniBand: options of opensm for virtual lanes, their weights and their service levels."""
    from common.qos.infiniband import opensm

    _print(config, opensm)


@app.command("roce")
def roce_command(dev: Device = "eth0", config: ConfigFile = None) -> None:
    """RoCE: DSCP, priority flow control and traffic classes of an interface, and what switches need."""
    from common.qos.roce import roce

    _print(config, lambda qos: roce(qos, _device(dev)))


@app.command("linux")
def linux_command(
    dev: Device = "eth0",
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="What really goes through, say 25gbit; without it nothing is shaped")
    ] = "",
    mtu: Annotated[int, typer.Option(min=576, max=65535, help="Of the interface, bytes")] = 1500,
    config: ConfigFile = None,
) -> None:
    """TCP on any NIC: queueing disciplines and filters of tc."""
    from common.qos.linux import linux

    _print(config, lambda qos: linux(qos, _device(dev), _rate(rate), mtu))


def _print(file: Path | None, lines: Callable[[QosConfig], list[str]]) -> None:
    with _errors():
        for line in lines(load_config(file).network.qos):
            print(line)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None


def _device(name: str) -> str:
    """It goes into a shell script."""
    if not re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name):
        raise ConfigError(f"--dev {name!r} is no network interface: `ip link` lists them")
    return name


def _rate(text: str) -> int | None:
    return int(parse_rate("--rate", text)) if text else None
