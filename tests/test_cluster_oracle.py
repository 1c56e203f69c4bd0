"""Data plane of the Oracle (spec §9): the null transport. Nothing is read, stored or moved; requests end as ever."""

from __future__ import annotations

import random

import pytest

from common.types import hit_block_limit
from services.storage_gateway.service import StorageGateway
from tests.cluster import cluster_config, run_cluster


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_nothing_moves(tmp_path, monkeypatch, read_side):
    async def refuse(self, msg, peer):
        raise AssertionError(f"the gateway was asked: {type(msg).__name__}")

    for handler in ("_on_read", "_on_announce", "_on_reserve", "_on_commit"):
        monkeypatch.setattr(StorageGateway, handler, refuse)

    async def everything_is_there(self, msg, peer):  # as the client says in a replay
        from common.messages import Matched
        from common.types import split_keys

        return Matched(len(split_keys(msg.keys)))

    monkeypatch.setattr(StorageGateway, "_on_match", everything_is_there)
    rng = random.Random(1)
    config = cluster_config("ds-27b", tmp_path, network__transport="null", scheduler__read_side=read_side)
    async with run_cluster(config) as cluster:
        for length in (1, 64, 65, 300):
            outcome = await cluster.driver.generate([rng.randint(3, 400) for _ in range(length)], 70)
            assert len(outcome.tokens) == 70 and outcome.cached_tokens == 64 * hit_block_limit(length, 64)
        await cluster.quiet()
        for manager in cluster.traffic_managers.values():
            counters = manager.metrics.snapshot().items()
            assert any("bytes_total" in name for name, _ in counters)
            assert not {name: value for name, value in counters if "bytes_total" in name and value}
