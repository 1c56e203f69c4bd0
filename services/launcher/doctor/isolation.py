"""Isolation between two hosts: one listens (`doctor --listen`), the other one measures (`doctor --peer`).

The control plane tells the caller where it can write; what is measured goes over the compute interfaces (network.cnic)
by the transport that the configuration comes to, but never by shared memory. Bulk in the class of the pings is the
network without isolation, bulk in KV's class the one with: no setting of the network is touched.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from common.config import Config, NetworkConfig
from common.errors import ConfigError, DualPathError
from common.faults import Faults
from common.isolation.latency import MOST_P50, MOST_P99, Latency, isolates, slowdown
from common.isolation.phases import Place, awake, bulk_from, ping_from, target_at
from common.metrics import Metrics
from common.model import Manifest
from common.rpc import Node, Peer
from common.transport.base import Intent
from common.wire import PROTOCOL_VERSION, message
from services.launcher.console import say
from services.launcher.doctor.check import Check, Level
from services.launcher.doctor.network import compute_interface, read_interfaces
from services.launcher.doctor.peer import judge_model, judge_mtu, judge_protocol, read_manifest

CALL_S = 10.0
FLOWS = 2
#: What bulk rides in each phase.
PHASES = {"idle": None, "same class": Intent.MODEL_COLLECTIVE, "own class": Intent.KV_LOAD}
FIX = "apply `dualpath qos` on both hosts and at every switch port between them"


@message
@dataclass(frozen=True, slots=True)
class AskTargets:
    """Caller to listener: where can I write?"""


@message
@dataclass(frozen=True, slots=True)
class Targets:
    """RegionDescriptors in hex, for pings and for bulk, and what the listener's host has to have in common with the
    caller's (doctor.peer): protocol version, mtu of its interface, manifest of its model, if it has one."""

    protocol: int
    small: str
    big: str
    mtu: int
    manifest: Manifest | None


def _place(config: Config) -> Place:
    """ConfigError for a transport that crosses no network."""
    kind = config.network.transport
    if kind in ("shm", "null"):
        raise ConfigError(f"network.transport {kind} crosses no network: set it to auto, tcp or verbs to measure one")
    return Place(config.network.cnic, NetworkConfig(transport=kind, rdma=config.network.rdma))


def _mtu(config: Config) -> int:
    found = compute_interface(config.network.cnic, read_interfaces() or [])
    return found.mtu if found is not None else 0


def _node(config: Config) -> Node:
    return Node(f"doctor.{secrets.token_hex(8)}", config.security, Metrics(), Faults([], "doctor"))


async def listen(config: Config, endpoint: str) -> None:
    """Answer callers until cancelled. ConfigError."""
    place, node, manifest = _place(config), _node(config), read_manifest(config)
    try:
        async with target_at(place) as small, target_at(place, gives_way=True) as big:
            targets = Targets(PROTOCOL_VERSION, small, big, _mtu(config), manifest)

            def answer(msg: AskTargets, peer: Peer) -> Targets:
                return targets

            node.on(AskTargets, answer)
            say(f"listening at {await node.bind(endpoint)}: run `dualpath doctor --peer` with it on the other host")
            await asyncio.Event().wait()
    finally:
        await node.close()


async def measure(config: Config, endpoint: str, seconds: float) -> tuple[dict[str, Latency], list[Check]]:
    """Latency by phase, and what it says; nothing is measured with a peer of another protocol. ConfigError if it cannot
    be measured."""
    place, node, manifest = _place(config), _node(config), read_manifest(config)
    try:
        targets: Targets = await node.link(endpoint).call(AskTargets(), CALL_S)
    except DualPathError as error:
        raise ConfigError(
            f"{error}: start `dualpath doctor --listen` there, of the same version and keys"
        ) from None
    finally:
        await node.close()
    alike = [judge_protocol(targets.protocol), judge_model(manifest, targets.manifest)]
    alike.append(judge_mtu(_mtu(config), targets.mtu))
    if targets.protocol != PROTOCOL_VERSION:
        return {}, alike
    measured = {}
    async with awake():
        for name, intent in PHASES.items():
            say(f"measuring: {name}")
            async with nullcontext() if intent is None else bulk_from([place], targets.big, intent, FLOWS):
                measured[name] = await ping_from(place, targets.small, seconds)
    return measured, [*alike, *judge_isolation(measured)]


def judge_isolation(measured: dict[str, Latency]) -> list[Check]:
    """A check a phase and the verdict."""
    idle, same, own = (measured[name] for name in PHASES)
    unisolated, isolated = slowdown(same, idle), slowdown(own, idle)
    checks = [Check(f"small message, {name}", Level.OK, str(latency)) for name, latency in measured.items()]
    ratios = (
        f"under bulk of its class {unisolated.p50:.1f} x idle at p50, under KV {isolated.p50:.2f} x, "
        f"{isolated.p99:.2f} x at p99 (at most {MOST_P50} and {MOST_P99})"
    )
    verdict = isolates(unisolated, isolated)
    if verdict is None:
        fix = "the bulk did not fill the network: isolation is neither shown nor needed at this load"
        return [*checks, Check("isolation", Level.WARN, ratios, fix)]
    return [*checks, Check("isolation", Level.OK if verdict else Level.FAIL, ratios, "" if verdict else FIX)]


def describe(measured: dict[str, Latency]) -> dict[str, Any]:
    """As JSON."""
    return {
        name.replace(" ", "_"): {"n": one.count, "p50_us": one.p50_s * 1e6, "p99_us": one.p99_s * 1e6}
        for name, one in measured.items()
    }
