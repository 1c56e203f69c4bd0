"""`dualpath doctor`. Its checks are imported by the command alone: the others of `dualpath` start without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from common.config import Config, endpoint_host, load_config
from common.errors import ConfigError
from services.launcher.console import ConfigFile, execute, tell
from services.launcher.doctor.check import Check, Level, healthy

#: Where a listener is found unless told otherwise: loopback, a port beside the scheduler's.
ENDPOINT = "tcp://127.0.0.1:5790"


def doctor(
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    listen: Annotated[
        str, typer.Option(metavar="ENDPOINT", help=f"Be the other side of a measurement, say {ENDPOINT}")
    ] = "",
    peer: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Measure isolation against a listener on another host")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Of each of three phases of a measurement")] = 5.0,
) -> None:
    """Check this host against the configuration, and measure isolation between two hosts. Exit status: 1 if anything
    failed."""
    execute(_doctor(config, as_json, listen, peer, seconds))


async def _doctor(file: Path | None, as_json: bool, listen: str, peer: str, seconds: float) -> int:
    from services.launcher import configuration
    from services.launcher.doctor import isolation

    if listen and peer:
        raise ConfigError("--listen and --peer are the two sides of a measurement: give one of them")
    for endpoint in filter(None, (listen, peer)):
        try:
            endpoint_host(endpoint)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    values, _, problems = configuration.check(file)
    if values is None and (listen or peer):
        raise ConfigError(str(problems[0]))
    config = values or _readable(file)
    if listen:
        with suppress(asyncio.CancelledError):
            await isolation.listen(config, listen)
        return 0
    extra: dict[str, Any] = {}
    if peer:
        measured, checks = await isolation.measure(config, peer, seconds)
        extra = {"isolation": isolation.describe(measured)}
    else:
        bad = [Check(problem.field, Level.FAIL, problem.what, f"see {problem.place}") for problem in problems]
        checks = [*bad, *await asyncio.to_thread(lambda: list(all_checks(config)))]
    _print(checks, extra, as_json)
    return 0 if healthy(checks) else 1


def _readable(file: Path | None) -> Config:
    """A configuration with problems, if they are not in its values; else the default one."""
    try:
        return load_config(file)
    except ConfigError:
        return Config()


def all_checks(config: Config) -> Iterator[Check]:
    """Everything about this host. Blocks for some seconds."""
    from common.transport.verbs.device import has_devices
    from services.launcher.doctor.host import check_host
    from services.launcher.doctor.network import check_network
    from services.launcher.doctor.rdma import check_rdma
    from services.launcher.doctor.software import check_software
    from services.launcher.doctor.storage import check_storage

    yield from check_software(config)
    yield from check_host(config, has_devices())
    yield from check_storage(config)
    yield from check_network(config)
    yield from check_rdma(config)


def _print(checks: list[Check], extra: dict[str, Any], as_json: bool) -> None:
    if as_json:
        told = {"ok": healthy(checks), "checks": [asdict(check) for check in checks], **extra}
        print(json.dumps(told, indent=1))
        return
    for check in checks:
        tell(str(check))
    counts = [f"{sum(check.level is level for check in checks)} {level.value}" for level in Level]
    tell(", ".join(counts))
