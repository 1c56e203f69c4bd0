"""Transports against the plainest way to do the same and against others', in one run: `loadgen bench transport`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.rundir import RunDirectory
from loadgen.bench.gateway import open_gateway
from loadgen.bench.pair import Measured, Pair, open_pair
from loadgen.bench.pieces import SIZES, Layout, layout
from loadgen.bench.rounds import interleaved, ratio, spread, summary
from loadgen.bench.stored import fill

#: The bytes that one move moves: the KV of some 7,000 tokens, as a request reads it.
MOVE_BYTES = 256 << 20
#: Other people's engines, by module of this package.
PEERS = ("mooncake", "nixl")
#: Each ratio: our way over theirs.
TCP_RATIOS = {"tcp_vs_plain": "plain", "tcp_vs_mooncake": "mooncake", "tcp_vs_nixl": "nixl"}
#: What the two processes of a way are called.
SIDES = {"write": ("sender", "receiver"), "read": ("receiver", "server")}
#: What results say of how they came about.
METHOD = (
    "two processes a way, regions of one size, the same pieces from and to the same scattered places; every way has "
    "its turn in each round, in random order, one move to warm up and one that counts, and its processes are stopped "
    "otherwise, as some poll when there is nothing to do; ratios are of rates within a round, median and quartiles, "
    "and of the best round of each; one without a size is that of the least favourable size; all ways but mooncake, "
    "nixl and memcpy verify an xxh3-64 of what arrives; those over tcp, but for mooncake and nixl with sockets of "
    "their own, leave out the pacing of the system's congestion control, as tcp does on a loopback"
)


@dataclass(slots=True)
class Found:
    """ways: by piece size and way, what each measured. ratios: flat. spreads: their quartiles. absent: peers that could
    not be run, and why."""

    ways: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, size: str, kind: str, measured: Mapping[str, Sequence[Measured]]) -> None:
        """kind: of SIDES."""
        for way, rounds in measured.items():
            told = summary(rounds)
            told["cpu_s_per_gib"] = dict(zip(SIDES[kind], told["cpu_s_per_gib"].values(), strict=True))
            self.ways.setdefault(size, {})[way] = told

    def compare(self, name: str, size: str, ours: Sequence[Measured], theirs: Sequence[Measured]) -> None:
        """Of this size, and of CPU time; the plain name has the least favourable size."""
        found = ratio(ours, theirs)
        self.spreads[f"{name}_{size.replace(' ', '')}"] = found
        self.ratios[f"{name}_{size.replace(' ', '')}"] = found["median"]
        self.ratios[name] = min(found["median"], self.ratios.get(name, found["median"]))
        cpu = spread([sum(b.cpu_per_gib()) / sum(a.cpu_per_gib()) for a, b in zip(ours, theirs, strict=False)])
        self.ratios[f"{name}_cpu"] = min(cpu["median"], self.ratios.get(f"{name}_cpu", cpu["median"]))


Told = Callable[[str], None]
"""Is told what is measured now."""


async def measure_all(rounds: int, python: str, told: Told) -> Found:
    """python: the interpreter in which the peers are installed. ConfigError if a way of our own fails."""
    found = Found()
    for size, num_bytes in SIZES.items():
        told(f"tcp, pieces of {size}")
        await _measure_tcp(found, size, layout(num_bytes, MOVE_BYTES), rounds, python)
        told(f"shm, pieces of {size}")
        await _measure_shm(found, size, layout(num_bytes, MOVE_BYTES), rounds)
    told("storage gateway")
    await _measure_gateway(found, "2.4 MiB", layout(SIZES["2.4 MiB"], MOVE_BYTES), rounds)
    return found


async def _measure_tcp(found: Found, size: str, pieces: Layout, rounds: int, python: str) -> None:
    async with AsyncExitStack() as ends:
        pairs = {way: await ends.enter_async_context(open_pair(way, pieces)) for way in ("ours", "plain")}
        for peer in PEERS:
            try:
                pairs[peer] = await ends.enter_async_context(open_pair(peer, pieces, python))
            except ConfigError as error:
                found.absent[peer] = str(error)
        measured = await _rounds(pairs, rounds, found)
    found.add(size, "write", {_shown(way, "tcp"): rounds_ for way, rounds_ in measured.items()})
    for name, way in TCP_RATIOS.items():
        if way in measured:
            found.compare(name, size, measured["ours"], measured[way])


async def _measure_shm(found: Found, size: str, pieces: Layout, rounds: int) -> None:
    async with AsyncExitStack() as ends:
        ways = ("shm", "memcpy", "local")
        pairs = {way: await ends.enter_async_context(open_pair(way, pieces, pulls=way == "local")) for way in ways}
        measured = await _rounds(pairs, rounds, found)
    found.add(size, "write", measured)
    found.compare("shm_vs_memcpy", size, measured["shm"], measured["memcpy"])


async def _measure_gateway(found: Found, size: str, pieces: Layout, rounds: int) -> None:
    with RunDirectory() as run:
        root = run.path / "blocks"
        root.mkdir()
        await fill(root, pieces)
        async with AsyncExitStack() as ends:
            pairs = {
                f"gateway {kind}": await ends.enter_async_context(open_gateway(pieces, root, kind, run))
                for kind in ("tcp", "shm")
            }
            plain = open_pair("sendfile", pieces, given=str(root), pulls=True)
            pairs["sendfile"] = await ends.enter_async_context(plain)
            measured = await _rounds(pairs, rounds, found)
    found.add(size, "read", measured)
    found.compare("gateway_vs_sendfile", size, measured["gateway tcp"], measured["sendfile"])
    found.compare("gateway_shm_vs_sendfile", size, measured["gateway shm"], measured["sendfile"])


async def _rounds(pairs: Mapping[str, Pair], rounds: int, found: Found) -> dict[str, list[Measured]]:
    def failed(way: str, error: ConfigError) -> None:
        if way not in PEERS:
            raise error
        found.absent[way] = f"failed in mid-way: {error}"

    return await interleaved({way: pair.measure for way, pair in pairs.items()}, rounds, failed)


def _shown(way: str, ours: str) -> str:
    return ours if way == "ours" else way


def described(found: Found, rounds: int) -> dict[str, Any]:
    """The result, for a file."""
    return {
        "kind": "transport benchmark",
        "method": METHOD,
        "rounds": rounds,
        "bytes_per_turn": MOVE_BYTES,
        "python": sys.version.split()[0],
        "ratios": found.ratios,
        "spreads": found.spreads,
        "ways": found.ways,
        "absent": found.absent,
    }
