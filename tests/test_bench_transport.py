"""The transport benchmark: what its ways move is the same, and what it concludes follows from what it measured."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.metrics import Metrics
from common.rundir import RunDirectory
from common.watchdog import CallbackTimes
from loadgen.bench.gateway import open_gateway
from loadgen.bench.loops import histograms
from loadgen.bench.pair import Measured, open_pair
from loadgen.bench.pieces import FULL_BLOCK, LAYER_BLOCK, Layout, layout
from loadgen.bench.rounds import interleaved, ratio
from loadgen.bench.stored import fill
from loadgen.bench.transport import Found


def measured(gib_per_s: float, cpu_s: float = 1.0) -> Measured:
    return Measured(1 << 30, 1 / gib_per_s, cpu_s / 2, cpu_s / 2)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 300), count=st.integers(2, 60))
def test_every_piece_goes_from_one_place_to_one_place(size: int, count: int) -> None:
    pieces = Layout(size, count)
    source, target, length = pieces.runs().T
    whole = np.arange(count) * size
    assert sorted(source) == sorted(target) == whole.tolist() and set(length) == {size}
    sent, received = pieces.content(), pieces.expected()
    for from_, to in zip(source, target, strict=True):
        assert np.array_equal(received[to : to + size], sent[from_ : from_ + size])


def test_sizes_are_the_blocks_of_deepseek_v3_2() -> None:
    assert LAYER_BLOCK == 64 * 656 and FULL_BLOCK == 61 * LAYER_BLOCK
    assert layout(FULL_BLOCK, 64 << 20).count == 26
    assert layout(100 << 20, 64 << 20).count == 2


def test_ratios_are_of_rounds_and_the_headline_is_the_worst_size() -> None:
    found = Found()
    ours, theirs = [measured(2.0), measured(3.0), measured(1.0)], [measured(1.0), measured(1.0), measured(1.0)]
    found.compare("tcp_vs_plain", "1 MiB", ours, theirs)
    found.compare("tcp_vs_plain", "41 KiB", [measured(0.9, 2.0)] * 3, theirs)
    assert found.ratios == {
        "tcp_vs_plain_1MiB": 2.0,
        "tcp_vs_plain": pytest.approx(0.9),
        "tcp_vs_plain_cpu": 0.5,
        "tcp_vs_plain_41KiB": pytest.approx(0.9),
    }
    assert found.spreads["tcp_vs_plain_1MiB"] == {"median": 2.0, "q1": 1.5, "q3": 2.5, "best": 3.0}


async def test_rounds_interleave_and_go_on_without_one_that_fails() -> None:
    order: list[str] = []

    async def turn(name: str, lasts: int) -> Measured:
        order.append(name)
        if order.count(name) > lasts:
            raise ConfigError("gone")
        return measured(1.0)

    failed: list[str] = []
    turns = {"good": partial(turn, "good", 99), "weak": partial(turn, "weak", 3), "dead": partial(turn, "dead", 0)}
    got = await interleaved(turns, 6, lambda name, error: failed.append(name))
    assert {name: len(values) for name, values in got.items()} == {"good": 6, "weak": 3}
    assert failed == ["dead", "weak"]
    assert set(order[:3]) == {"good", "weak", "dead"} and set(order[3:5]) == {"good", "weak"}
    assert ratio(got["good"], got["weak"])["median"] == 1.0


def test_histograms_add_up_by_role() -> None:
    pages = []
    for seconds in ([0.0001, 0.003], [0.0001, 0.03, 0.5]):
        metrics, times = Metrics(), CallbackTimes()
        metrics.registry.register(times)
        for one in seconds:
            times.add(one, None)
        pages.append(("traffic-manager", metrics.exposition().decode()))
    told = histograms(pages)["traffic-manager"]
    assert told["0.001"] == 2 and told["0.005"] == 3 and told["0.05"] == 4 and told["+Inf"] == 5
    assert told["over_limit"] == 2


@pytest.mark.parametrize("way", ["ours", "plain", "shm", "memcpy", "local"])
async def test_a_way_moves_every_piece(way: str) -> None:
    """open_pair() checks what arrives; both processes are found out about."""
    pieces = Layout(50_000, 40)
    async with asyncio.timeout(60), open_pair(way, pieces, pulls=way == "local") as pair:
        told = await pair.measure()
        assert told.num_bytes == pieces.region_bytes and told.seconds > 0 and told.active_cpu_s > 0
        await pair.check()


@pytest.mark.skipif(find_spec("mooncake") is not None, reason="mooncake is installed")
async def test_a_way_that_is_not_installed_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"mooncake, passive side ended: .*mooncake"):
        async with open_pair("mooncake", Layout(10, 2)):
            pass
    with pytest.raises(ConfigError, match="no/python cannot be run"):
        async with open_pair("plain", Layout(10, 2), "no/python"):
            pass


async def test_the_gateway_and_sendfile_bring_the_same_blocks() -> None:
    pieces = Layout(FULL_BLOCK, 3)
    with RunDirectory() as run:
        root = run.path / "blocks"
        root.mkdir()
        await fill(root, pieces)
        async with asyncio.timeout(90), open_gateway(pieces, root, "tcp", run) as pair:
            assert (await pair.measure()).num_bytes == 3 * FULL_BLOCK
        async with asyncio.timeout(60), open_pair("sendfile", pieces, given=str(root), pulls=True) as pair:
            assert (await pair.measure()).passive_cpu_s > 0
