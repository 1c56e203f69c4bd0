"""What the scheduler process makes of messages: policy events on the one side, assignments on the other."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from common.messages import Assign, EngineLoad, Fetch
from common.types import ReadPath, Sampling
from services.scheduler.policy import Fetched, Load, RequestArrived
from services.scheduler.policy.record import read_record
from tests.cluster import cluster_config, run_cluster


def recorded(path, kind):
    _, steps = read_record(path.read_text().splitlines(keepends=True))
    return [step.event for step in steps if isinstance(step.event, kind)]


async def test_hits_that_the_client_knows_are_not_looked_up(model, tmp_path):
    """They are cut to whole blocks, and to leave a token to compute. What is missing after all is a miss."""
    record = tmp_path / "record"
    config = cluster_config(model, tmp_path / "blocks", scheduler__record=str(record))
    async with run_cluster(config) as cluster:

        async def no_lookup(request):
            raise AssertionError("looked up")

        cluster.scheduler._lookup.hit_blocks = no_lookup
        prompt = [7] * 192
        for hit in (0, 100, 10_000, -5):
            request = replace(cluster.driver.request(prompt, Sampling(2, ignore_eos=True)), hit_tokens=hit)
            outcome = await cluster.driver.submit(request)
            async with asyncio.timeout(30):
                await outcome.done.wait()
            assert outcome.finished is not None
            await cluster.quiet()
    assert [event.hit_tokens for event in recorded(record, RequestArrived)] == [0, 64, 128, 0]


async def test_a_groups_fetch_is_one_event(model, tmp_path):
    record = tmp_path / "record"
    config = cluster_config(model, tmp_path / "blocks", scheduler__record=str(record))
    async with run_cluster(config) as cluster:
        loads = [EngineLoad("a.1", 1, 200, 3, 400, 5.5, 0), EngineLoad("b.1", 0, 0, 0, 0, 0.0, 0)]
        cluster.driver.scheduler.send(Fetch(loads))
        await cluster.driver.generate([7] * 70, 2)
    expected = Fetched((Load("a.1", 1, 200, 3, 5.5, 400, 0), Load("b.1", 0, 0, 0, 0.0, 0, 0)))
    assert expected in recorded(record, Fetched)


async def test_both_engines_are_told_what_each_side_reads(model, tmp_path):
    """A split of equal queues and rates: half of the two hit blocks each."""
    assigned = []
    async with run_cluster(cluster_config(model, tmp_path / "blocks", scheduler__read_side="split")) as cluster:
        rng = random.Random(1)
        prompt = [rng.randrange(3, 500) for _ in range(150)]
        await cluster.driver.generate(prompt, 2)
        await cluster.quiet()
        tell = cluster.scheduler._notices.tell

        def told(member, msg):
            if isinstance(msg, Assign):
                assigned.append((member.name, msg))
            return tell(member, msg)

        cluster.scheduler._notices.tell = told
        await cluster.driver.generate(prompt, 2)
    assert [name for name, _ in assigned] == ["decode-0", "prefill-0"]
    assert assigned[0][1] == assigned[1][1]
    msg = assigned[0][1]
    assert (msg.read_path, msg.hit_blocks, msg.pe_blocks) == (ReadPath.SPLIT, 2, 1)
    assert 0 <= msg.waited_s < 60
