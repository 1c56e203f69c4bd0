"""Split reads (spec §12): the first hit blocks come from the PE side, the others from the DE side, at the same time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from common.faults import Fault
from common.types import ReadPath, Sampling
from services.decode.service import DecodeEngine
from services.prefill.service import PrefillEngine
from services.storage_gateway.reader import BlockReader
from tests.cluster import cluster_config, random_prompt, run_cluster
from tests.test_cluster_bytes import measure


@pytest.fixture
def split_at(monkeypatch):
    """split_at(n): whatever the scheduler chose, the PE side reads the first n hit blocks and the DE side the rest."""
    pe_blocks = 0

    def forced(assigned):
        def split(self, msg):
            blocks = min(pe_blocks, msg.hit_blocks)
            assigned(self, replace(msg, read_path=ReadPath.SPLIT, pe_blocks=blocks))

        return split

    for engine in (PrefillEngine, DecodeEngine):
        monkeypatch.setattr(engine, "assigned", forced(engine.assigned))

    def choose(blocks):
        nonlocal pe_blocks
        pe_blocks = blocks

    return choose


def block_file(blocks_dir, key):
    (path,) = (blocks_dir / "blocks").rglob(key.hex() + "*")
    return path


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("pe_blocks", [0, 1, 2, 4])
async def test_bytes_unchunked(model, reference, tmp_path, split_at, transport, pe_blocks):
    """Hits cross storage once in all. The decode buffer gets what it has not read: the PE's hits and the misses."""
    base = random_prompt(1, 256)
    prompt = base + random_prompt(2, 30)
    here, there = 64 * pe_blocks, 256 - 64 * pe_blocks
    split_at(pe_blocks)
    async with run_cluster(cluster_config(model, tmp_path, network__transport=transport)) as cluster:
        await cluster.driver.generate(base, 1)
        outcome, prefill, decode = await measure(cluster, prompt, 3)
        assert outcome.cached_tokens == 256 and outcome.tokens == reference.greedy(prompt, 3)
        assert prefill == {
            "read": here, "written": 0, "load": here, "push": 0, "handoff": here + 30, "keep": 0, "h2d": 0
        }  # fmt: skip
        assert decode == {
            "read": there, "written": 0, "load": 0, "push": there, "handoff": 0, "keep": 0, "h2d": 5 * 64
        }  # fmt: skip


async def test_bytes_chunked(model, reference, tmp_path, split_at):
    """Every chunk loads our part of the hits from here and all other earlier rows from the decode buffer."""
    base = random_prompt(3, 128)
    prompt = base + random_prompt(4, 3 * 64)
    split_at(1)
    async with run_cluster(cluster_config(model, tmp_path, prefill__max_batch_tokens=64)) as cluster:
        await cluster.driver.generate(base, 1)
        outcome, prefill, decode = await measure(cluster, prompt, 2)
        assert outcome.tokens == reference.greedy(prompt, 2)
        assert prefill["read"] == decode["read"] == 64
        assert prefill["load"] == 3 * 64 and prefill["keep"] == 0
        assert decode["push"] == 64 + 2 * 64 + 3 * 64
        assert prefill["handoff"] == 64 + 3 * 64 and decode["written"] == 3 * 64


@pytest.mark.parametrize("kind", ["corrupt", "missing"])
@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("bad", range(5))
async def test_a_bad_block_on_either_side(model, reference, tmp_path, split_at, monkeypatch, kind, budget, bad):
    """Hits end at it, whichever side reads it (PE 0 and 1, DE 2 to 4); what is behind it is computed."""
    prompt = random_prompt(5, 5 * 64 + 10)
    expected = reference.greedy(prompt, 6)
    split_at(2)
    async with run_cluster(cluster_config(model, tmp_path, prefill__max_batch_tokens=budget)) as cluster:
        driver = cluster.driver
        await driver.generate(prompt, 1)
        await cluster.quiet()
        key = driver.request(prompt, Sampling(1)).block_keys[bad]
        path = block_file(tmp_path, key)
        if kind == "corrupt":
            data = bytearray(path.read_bytes())
            data[-997] ^= 0x40
            path.write_bytes(data)
        else:  # it goes between lookup and read
            read = BlockReader.read

            async def read_after_loss(self, request_id, keys, *args):
                if key in keys:
                    path.unlink(missing_ok=True)
                return await read(self, request_id, keys, *args)

            monkeypatch.setattr(BlockReader, "read", read_after_loss)
        outcome = await driver.generate(prompt, 6)
        assert outcome.tokens == expected and outcome.cached_tokens == 64 * bad
        await cluster.quiet()
        monkeypatch.undo()  # and with it the split
        again = await driver.generate(prompt, 6)
        assert again.tokens == expected and again.cached_tokens == 5 * 64  # stored again, and right


@pytest.mark.parametrize(("late", "hits"), [("prefill-0.tm", 0), ("decode-0.tm", 2 * 64)])
async def test_a_late_read_on_one_side(model, reference, tmp_path, split_at, late, hits):
    """The side whose answer does not come has no hits; its late bytes land in slots that nobody uses."""
    slow = Fault(point="message", action="delay", process=late, type="ReadBlocks", seconds=3.0)
    config = cluster_config(model, tmp_path, timeouts__read_s=1.0, timeouts__breaker_s=0.2, faults=[slow])
    prompt = random_prompt(6, 300)
    expected = reference.greedy(prompt, 8)
    split_at(2)
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        outcome = await cluster.driver.generate(prompt, 8)
        assert outcome.tokens == expected and outcome.cached_tokens == hits
        await cluster.quiet()
        assert (await cluster.driver.generate(prompt, 8)).tokens == expected


async def test_turns_of_an_agent(model, reference, tmp_path, split_at):
    """What a split request computes anew is stored, and nothing else: later turns hit it, read on other sides."""
    rng = random.Random(7)
    history: list[int] = []
    async with run_cluster(cluster_config(model, tmp_path, prefill__max_batch_tokens=128)) as cluster:
        for turn in range(5):
            split_at(rng.randint(0, 4))
            prompt = history + random_prompt(turn, 90)
            outcome = await cluster.driver.generate(prompt, 40)
            assert outcome.tokens == reference.greedy(prompt, 40)
            assert outcome.cached_tokens == 64 * (max(len(history) - 1, 0) // 64)
            history = prompt + outcome.tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_as_the_scheduler_splits(model, reference, tmp_path, transport):
    """Many at a time on two by two, chunked, a third of them cancelled: tokens are right, both sides read, all is given
    back."""
    rng = random.Random(transport)
    base = random_prompt(8, 320)
    config = cluster_config(
        model, tmp_path, scheduler__read_side="split", network__transport=transport, prefill__max_batch_tokens=192
    )
    async with run_cluster(config, prefill=2, decode=2) as cluster:
        driver = cluster.driver
        await driver.generate(base, 1)

        async def one(index):
            prompt = base[: 64 * rng.randint(0, 5)] + random_prompt(index, rng.randint(1, 90))
            request = driver.request(prompt, Sampling(4, ignore_eos=True))
            outcome = await driver.submit(request)
            if index % 3 == 0:
                await asyncio.sleep(rng.random() * 0.2)
                driver.cancel(request)
                return
            async with asyncio.timeout(60):
                await outcome.done.wait()
            assert outcome.failed is None and outcome.tokens == reference.greedy(prompt, 4)

        for start in range(0, 45, 15):
            await asyncio.gather(*(one(start + index) for index in range(15)))
        await cluster.quiet()
        split = "storage_read_path_bytes_total{path=split}"
        for side in ("prefill", "decode"):
            assert sum(cluster.counter(split, name) for name in cluster.engines if name.startswith(side)) > 0
