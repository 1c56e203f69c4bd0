"""Bytes counted by intent, class, path, hop and NIC in every process: they add up with what the block store served."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from common.transport.base import Intent
from common.transport.classes import CLASS_OF_INTENT
from tests.cluster import Cluster, cluster_config, random_prompt, run_cluster
from tests.models import tiny_model

#: Which hops are transfers of which intent.
HOPS = {
    "kv_load": ("load", "push", "keep", "h2d"),
    "pd_handoff": ("handoff",),
    "kv_persist": ("d2h",),
}
PATHS = {"round_robin": {"pe", "de"}, "split": {"split"}}
NIC_BYTES = re.compile(r"nic_bytes_total\{direction=(\w+),intent=(\w+),nic=(.+),traffic_class=(\w+)\}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")


def nic_bytes(cluster: Cluster, interface: str, direction: str) -> Counter[str]:
    """By intent: bytes through all NICs of this kind, whoever wrote them. Each rides in the class of its intent."""
    assert cluster.gateway is not None
    found: Counter[str] = Counter()
    for service in (*cluster.traffic_managers.values(), cluster.gateway):
        for name, value in service.metrics.snapshot().items():
            if labels := NIC_BYTES.fullmatch(name):
                assert labels[4] == CLASS_OF_INTENT[Intent(labels[2])].name
                if labels[1] == direction and labels[3].endswith(interface):
                    found[labels[2]] += int(value)
    return found


@pytest.mark.parametrize("read_side", ["round_robin", "split"])
@pytest.mark.parametrize(("transport", "direct"), [("shm", True), ("tcp", True), ("tcp", False)])
async def test_counters_add_up_with_the_block_store(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, read_side: str, direct: bool
) -> None:
    """direct: blocks go straight from their files."""
    monkeypatch.setattr("services.storage_gateway.reader.DIRECT_BYTES", 1 if direct else 1 << 40)
    chance = random.Random(5)
    config = cluster_config(model, tmp_path, scheduler__read_side=read_side, network__transport=transport)
    async with run_cluster(config) as cluster:
        prompt = random_prompt(chance, 300)
        for _ in range(3):
            outcome = await cluster.driver.generate(prompt, 70)
            await cluster.quiet()
            prompt = prompt + outcome.tokens + random_prompt(chance, 30)
        assert cluster.gateway is not None
        served = cluster.gateway.metrics.snapshot()
        read, written = served["block_store_read_bytes_total"], served["block_store_written_bytes_total"]
        assert read > 0 and written > 0
        assert cluster.counter("storage_read_bytes_total") == read
        names = {path: f"storage_read_path_bytes_total{{path={path}}}" for path in ("pe", "de", "split")}
        by_path = {path: cluster.counter(name) for path, name in names.items()}
        assert {path for path, value in by_path.items() if value} == PATHS[read_side]
        assert sum(by_path.values()) == read
        assert cluster.counter("storage_write_bytes_total") == written
        assert nic_bytes(cluster, "/snic", "rx") == {"kv_load": read}
        assert nic_bytes(cluster, "/snic", "tx") == {"kv_persist": written}
        hops = {hop: cluster.counter(f"kv_bytes_total{{hop={hop}}}") for group in HOPS.values() for hop in group}
        expected = {intent: sum(hops[hop] for hop in group) for intent, group in HOPS.items()}
        assert nic_bytes(cluster, "/cnic", "tx") == nic_bytes(cluster, "/cnic", "rx") == expected
