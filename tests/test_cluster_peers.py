"""Peers that are wrong, refuse or go away: nobody else suffers, and nothing is kept for them."""

from __future__ import annotations

import random

import pytest

from common.errors import DualPathError, ErrorCode
from common.messages import Cancel, GetStatus
from services.engine.reference import Reference
from tests.cluster import cluster_config, run_cluster
from tests.models import tiny_model

VOCAB = range(3, 500)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


def random_prompt(seed, length):
    rng = random.Random(seed)
    return [rng.choice(VOCAB) for _ in range(length)]


async def test_a_call_of_a_one_way_message_is_refused(model, reference, tmp_path):
    """F07: it has no answer; the process that got it goes on reading."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        with pytest.raises(DualPathError) as failure:
            await cluster.driver.scheduler.call(Cancel("nobody", 0), 1.0)
        assert failure.value.code is ErrorCode.MALFORMED
        await cluster.driver.scheduler.call(GetStatus(), 1.0)
