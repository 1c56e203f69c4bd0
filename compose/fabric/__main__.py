"""Fabrics for people: `python -m compose.fabric up 2P4D --snic 26MB --cnic 213MB`, then exec, stats, rate, down ..."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from common.errors import ConfigError
from compose.fabric import measure, registry
from compose.fabric.fabric import Fabric
from compose.fabric.layout import Nic, parse_rate, parse_shape

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


class NicName(StrEnum):
    SNIC = "snic"
    CNIC = "cnic"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


Name = Annotated[str, typer.Option(help="Of the fabric")]
Node = Annotated[str, typer.Argument(help="p0.., d0.., store or ctl", show_default=False)]
NicArgument = Annotated[NicName, typer.Argument(show_default=False)]
RateOption = Annotated[str, typer.Option(metavar="RATE", help="Bytes/s each way")]
LAB = "lab"


def _nic(name: NicName) -> Nic:
    return "snic" if name is NicName.SNIC else "cnic"


@app.command()
def up(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="Nodes, say 2P4D", show_default=False)],
    snic: RateOption = "26MB",
    cnic: RateOption = "208MB",
    classes: Annotated[bool, typer.Option(help="KV in a class of its own on the compute network")] = True,
    name: Name = LAB,
) -> None:
    """Make one that stays until `down`; one of the same name is made afresh."""
    fabric = Fabric.up(*parse_shape(shape), parse_rate(snic), parse_rate(cnic), classes=classes, name=name, keep=True)
    for node in fabric.nodes:
        print(node, *(f"{nic} {address}" for nic, address in fabric.addresses(node).items()))
    print(f"front end {fabric.url}")


@app.command()
def down(name: Name = LAB) -> None:
    """Kill what runs in it and remove it."""
    Fabric.attach(name).down()


@app.command("list")
def list_() -> None:
    """The fabrics of this machine."""
    for name in registry.names():
        layout = registry.load(name)
        if layout is not None:
            rates = f"snic {layout.snic_rate:,} cnic {layout.cnic_rate:,} bytes/s at its start"
            print(f"{name} {layout.prefill}P{layout.decode}D {rates}")


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(node: Node, command: Annotated[list[str], typer.Argument(show_default=False)], name: Name = LAB) -> None:
    """Run a command on a node, with the settings of a dualpath process there in its environment."""
    fabric = Fabric.attach(name)
    arguments = [*fabric.prefix(node), *command]
    os.execvpe(arguments[0], arguments, {**os.environ, **fabric.environment(node)})


@app.command()
def stats(name: Name = LAB) -> None:
    """Bytes of every shaped NIC, by direction and class."""
    for counter in Fabric.attach(name).stats():
        print(
            f"{counter.node:5} {counter.nic} {counter.direction} {counter.traffic_class:4} {counter.bytes:>15,} bytes "
            f"{counter.dropped_packets:>8,} dropped {counter.queued_bytes:>10,} queued"
        )


@app.command()
def rate(
    node: Node,
    nic: NicArgument,
    rate: Annotated[str, typer.Argument(metavar="RATE", show_default=False)],
    name: Name = LAB,
) -> None:
    """Change one NIC's rate."""
    Fabric.attach(name).set_rate(node, _nic(nic), parse_rate(rate))


@app.command()
def link(node: Node, nic: NicArgument, state: Switch, name: Name = LAB) -> None:
    """Plug one NIC's cable in, or pull it out."""
    Fabric.attach(name).link(node, _nic(nic), state is Switch.ON)


@app.command()
def classes(state: Switch, name: Name = LAB) -> None:
    """Tell KV from the rest on the compute network, or not."""
    Fabric.attach(name).set_classes(state is Switch.ON)


@app.command()
def kill(node: Node, name: Name = LAB) -> None:
    """SIGKILL everything on a node."""
    Fabric.attach(name).kill(node)


@app.command("measure")
def measure_(
    snic: RateOption = "26MB",
    cnic: RateOption = "208MB",
    seconds: Annotated[float, typer.Option(min=0.5, help="For each rate")] = 3.0,
) -> None:
    """Rates of the NICs of a fabric made for it, and what small messages wait under bulk, classed or not."""
    with Fabric.up(1, 1, parse_rate(snic), parse_rate(cnic)) as fabric:
        for line in measure.report(fabric, seconds):
            print(line, flush=True)


def main() -> None:
    try:
        app(prog_name="python -m compose.fabric")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
