"""A cluster behind paced NICs: the same tokens, and each byte counted at the NICs that it went through."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from services.engine.torch_backend.reference import Reference
from tests.cluster import Cluster, cluster_config, run_cluster
from tests.models import tiny_model

# in tokens: NIC, direction -> what spec §4 sends through it for 364 prompt tokens of which 320 are hits; the
# DE's device takes whole blocks, 384 tokens
PE_PATH = {
    ("prefill-0/snic", "rx"): 320,
    ("prefill-0/cnic", "tx"): 320 + 364,  # PE buffer -> PE device memory -> DE buffer
    ("prefill-0/cnic", "rx"): 320,
    ("decode-0/cnic", "rx"): 364 + 384,
    ("decode-0/cnic", "tx"): 384,  # DE buffer -> DE device memory
}
DE_PATH = {
    ("decode-0/snic", "rx"): 320,
    ("decode-0/cnic", "tx"): 320 + 384,  # DE buffer -> PE device memory; DE buffer -> DE device memory
    ("prefill-0/cnic", "rx"): 320,
    ("prefill-0/cnic", "tx"): 44,  # the misses, back
    ("decode-0/cnic", "rx"): 44 + 384,
}


def nic_tokens(cluster: Cluster) -> Counter[tuple[str, str]]:
    """(NIC, direction) -> tokens' worth of bytes, over all processes that write."""
    found: Counter[tuple[str, str]] = Counter()
    assert cluster.gateway is not None
    for service in [*cluster.traffic_managers.values(), cluster.gateway]:
        for name, value in service.metrics.snapshot().items():
            labels = re.fullmatch(r"nic_bytes_total\{direction=(\w+),intent=\w+,nic=([^/]+)/(?:.+/)?(\w+),.*\}", name)
            if labels is not None:
                found[f"{labels[2]}/{labels[3]}", labels[1]] += int(value)
    per_token = cluster.prefill().geometry.bytes_per_token
    return Counter({place: num_bytes // per_token for place, num_bytes in found.items()})


@pytest.mark.parametrize(("read_side", "moved"), [("pe_only", PE_PATH), ("de_only", DE_PATH)])
async def test_a_cluster_of_paced_nics(tmp_path, read_side, moved):
    model = tiny_model(tmp_path, "llama")
    prompt = [random.Random(1).randrange(3, 500) for _ in range(364)]
    config = cluster_config(
        model,
        tmp_path / "blocks",
        scheduler__read_side=read_side,
        network__snic_rate=4e6,
        network__cnic_rate=16e6,
    )
    async with run_cluster(config) as cluster:
        await cluster.driver.generate(prompt, 1)
        await cluster.quiet()
        before = nic_tokens(cluster)
        assert before["decode-0/snic", "tx"] == 320  # five blocks to storage
        outcome = await cluster.driver.generate(prompt, 8)
        await cluster.quiet()
        assert outcome.cached_tokens == 320
        assert outcome.tokens == Reference(model).greedy(prompt, 8)
        assert dict(nic_tokens(cluster) - before) == moved
