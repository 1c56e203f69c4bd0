"""A live run that is recorded decides alike when it is replayed (design: decisions are pure)."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

from common.errors import ConfigError
from common.types import Sampling
from services.scheduler.policy import (
    EngineJoined,
    EngineLeft,
    Fetched,
    KvHandedOver,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Start,
)
from services.scheduler.policy.record import read_record, replay
from tests.cluster import cluster_config, run_cluster
from tests.models import tiny_model


async def test_a_recorded_live_run_replays_alike(tmp_path):
    model = tiny_model(tmp_path, "llama")
    path = tmp_path / "run.jsonl"
    config = cluster_config(model, tmp_path / "blocks", scheduler__record=str(path), scheduler__beta=300)
    async with run_cluster(config, prefill=2, decode=2) as cluster:
        rng = random.Random(1)
        base = [rng.randrange(3, 500) for _ in range(200)]
        await asyncio.gather(*(cluster.driver.generate(base[: 50 + 10 * n], 5) for n in range(12)))
        request = cluster.driver.request(base, Sampling(40, ignore_eos=True))
        await cluster.driver.submit(request)
        cluster.driver.cancel(request)
        await cluster.quiet()
    settings, steps = read_record(path.read_text().splitlines(keepends=True))
    assert settings == cluster.scheduler.policy.config and settings.beta == 300
    kinds = {type(step.event) for step in steps}
    assert kinds >= {EngineJoined, Fetched, RequestArrived, PrefillEnded, KvHandedOver, RequestEnded, RequestCancelled}
    assert EngineLeft in kinds
    assert sum(isinstance(action, Start) for step in steps for action in step.actions) >= 12
    assert replay(settings, steps) == []
    # and it would be seen if it did not
    assert replay(replace(settings, beta=1), steps)
    index = next(i for i, step in enumerate(steps) if step.actions)
    forged = [*steps[:index], replace(steps[index], actions=[]), *steps[index + 1 :]]
    assert [step for step, _ in replay(settings, forged)] == [forged[index]]


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    settings = {"read_side": "split", "alpha": 1, "beta": 2, "max_waiting": 3, "block_size": 64}
    step = [0.1, ["RequestEnded", {"key": ["a", 0]}], []]
    lines = [json.dumps(settings) + "\n", json.dumps(step) + "\n", json.dumps(step)[:-5]]
    config, steps = read_record(lines)
    assert (config.read_side, config.beta) == ("split", 2)
    assert [(step.now, step.event) for step in steps] == [(0.1, RequestEnded(("a", 0)))]


async def test_a_record_that_cannot_be_written_is_named(tmp_path):
    model = tiny_model(tmp_path, "llama")
    config = cluster_config(model, tmp_path / "blocks", scheduler__record=str(tmp_path / "no" / "run.jsonl"))
    with pytest.raises(ConfigError, match=r"scheduler\.record .*run\.jsonl: No such file"):
        async with run_cluster(config):
            pass
