"""Faults behind the API: each client gets its whole output, once, or an error in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ErrorCode
from common.faults import Fault
from services.decode.sequence import Sequence
from services.decode.service import DecodeEngine
from services.engine.torch_backend.reference import Reference
from tests.cluster import Cluster, random_prompt
from tests.frontend_harness import events_of
from tests.test_frontend_cluster import serve

#: What is lost is missed soon.
HASTY = {f"timeouts__{name}_s": 1.0 for name in ("call", "stage", "transfer", "read", "store")}


async def ask(http: httpx.AsyncClient, prompt: list[int], max_tokens: int = 6, **options: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return await http.post("/v1/completions", json={**body, **options})


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


async def settled(cluster: Cluster) -> None:
    """Nothing is in hand or reserved anywhere."""
    await cluster.quiet()
    cluster.check_integrity()


async def test_a08_what_decode_refuses_after_prefill_is_an_error_at_once(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 requests whose KV has been computed and sent: refused, told, and released on both sides."""
    refused = 0
    hand_over = DecodeEngine._hand_over_if_ready

    def refuse(engine: DecodeEngine, sequence: Sequence) -> None:
        nonlocal refused
        if not sequence.ready or sequence.request.num_tokens != 100:
            hand_over(engine, sequence)
            return
        refused += 1
        engine.request_failed(sequence.key, ErrorCode.BAD_REQUEST, "refused by the test")
        engine.drop(sequence.key)

    monkeypatch.setattr(DecodeEngine, "_hand_over_if_ready", refuse)
    async with serve(model, tmp_path) as (cluster, http):
        answers = await asyncio.gather(*(ask(http, random_prompt(seed, 100)) for seed in range(50)))
        assert refused == 50
        for answer in answers:
            assert answer.status_code == 400 and "refused by the test" in answer.json()["error"]["message"]
        await settled(cluster)
        prompt = random_prompt(99, 90)
        assert tokens_of(await ask(http, prompt)) == reference.greedy(prompt, 6)


@pytest.mark.parametrize("action", ["fail", "drop"])
async def test_a11_a_dispatch_that_does_not_arrive(
    model: Path, reference: Reference, tmp_path: Path, action: Any
) -> None:
    """To one engine of a request. Refused: it is sent again at once. Lost on the way: the request goes on in a new
    attempt. Either way its client gets its answer."""
    faults = [Fault(point="message", action=action, process="scheduler", type="Assign", after=2, times=1)]
    async with serve(model, tmp_path, prefill=2, decode=2, faults=faults, **HASTY) as (cluster, http):
        prompts = [random_prompt(seed, 120) for seed in range(4)]
        async with asyncio.timeout(30):
            for prompt in prompts:
                assert tokens_of(await ask(http, prompt)) == reference.greedy(prompt, 6)
        await settled(cluster)


async def test_a12_a_prefill_that_fails_is_one_clients_error(model: Path, reference: Reference, tmp_path: Path) -> None:
    faults = [Fault(point="compute", action="fail", process="prefill-0", after=7, times=1)]
    async with serve(model, tmp_path, faults=faults) as (cluster, http):
        prompts = [random_prompt(seed, 80) for seed in range(20)]
        answers = await asyncio.gather(*(ask(http, prompt) for prompt in prompts))
        failed = [answer for answer in answers if answer.status_code != 200]
        assert [answer.status_code for answer in failed] == [500]
        assert "compute failed" in failed[0].json()["error"]["message"]
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.status_code == 200:
                assert tokens_of(answer) == reference.greedy(prompt, 6)
        await settled(cluster)


async def test_a16_a_prefill_engine_is_replaced_under_its_name(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Not even the request that it had in hand is lost; the decode engine stays as it is."""
    async with serve(model, tmp_path, prefill__max_batch_tokens=64) as (cluster, http):
        decode = cluster.decode().incarnation
        long = random_prompt(1, 900)
        running = asyncio.create_task(ask(http, long))
        while not cluster.prefill().load()[0]:
            await asyncio.sleep(0.005)
        old, old_manager = cluster.engines.pop("prefill-0"), cluster.traffic_managers.pop("prefill-0")
        await cluster.add_engine("prefill-0", cluster.config)
        assert cluster.prefill().incarnation != old.incarnation
        await old.stop(drain=False)
        await old_manager.stop(drain=False)
        assert tokens_of(await running) == reference.greedy(long, 6)
        prompt = random_prompt(2, 100)
        assert tokens_of(await ask(http, prompt)) == reference.greedy(prompt, 6)
        assert cluster.decode().incarnation == decode
        await settled(cluster)


async def test_a18_kv_that_waits_long_for_decode_is_kept(model: Path, reference: Reference, tmp_path: Path) -> None:
    """It waits longer than any transfer may take; what it decodes from is still its own."""
    slow = [Fault(point="compute", action="delay", process="decode-0", seconds=0.02, times=0)]
    limits: dict[str, Any] = {"timeouts__stage_s": 0.6, "timeouts__transfer_s": 0.3, "timeouts__call_s": 0.3}
    async with serve(model, tmp_path, decode__max_running=1, faults=slow, **limits) as (cluster, http):
        first, second = random_prompt(3, 100), random_prompt(4, 100)
        begun = time.monotonic()
        answers = await asyncio.gather(ask(http, first, 150), ask(http, second, 20))
        assert time.monotonic() - begun > 2.0, "the second one has waited"
        assert [tokens_of(answer) for answer in answers] == [reference.greedy(first, 150), reference.greedy(second, 20)]
        await settled(cluster)


@pytest.mark.parametrize("lost", ["Accepted", "Tokens", "Finished", "FirstToken"])
async def test_a26_a_reset_repeats_nothing(model: Path, reference: Reference, tmp_path: Path, lost: str) -> None:
    """Just after the dispatch, after 5 tokens, or at the end something is lost between front end and cluster: each
    index comes once, with its log probability, and the output is the same."""
    after = 5 if lost == "Tokens" else 0
    faults = [Fault(point="message", action="drop", type=lost, after=after, times=1)]
    prompt = random_prompt(5, 100)
    async with serve(model, tmp_path, faults=faults, **HASTY) as (cluster, http):
        response = await ask(http, prompt, 30, stream=True, logprobs=0, stream_options={"include_usage": True})
        *chunks, usage, done = events_of(response.text)
        assert done == "[DONE]", usage
        choices = [chunk["choices"][0] for chunk in chunks]
        expected = reference.greedy(prompt, 30)
        assert [token for choice in choices for token in choice["token_ids"]] == expected
        values = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
        rows = reference.logits(prompt + expected)[len(prompt) - 1 : -1].log_softmax(dim=-1)
        assert values == pytest.approx([float(row[token]) for row, token in zip(rows, expected, strict=True)], abs=1e-3)
        assert usage["usage"]["completion_tokens"] == 30
        await settled(cluster)


async def test_c12_cancelled_requests_that_wait_are_never_prefilled(model: Path, tmp_path: Path) -> None:
    """200 are queued behind a long one and leave; the next one is next."""
    async with serve(model, tmp_path, prefill__max_batch_tokens=64, prefill__max_batch_requests=1) as (cluster, http):
        computed = cluster.prefill().metrics
        long = asyncio.create_task(ask(http, random_prompt(6, 1200), 1))
        while not cluster.prefill().load()[0]:
            await asyncio.sleep(0.005)
        queued = [asyncio.create_task(ask(http, random_prompt(seed, 500), 1)) for seed in range(100, 300)]
        await asyncio.sleep(0.05)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        assert (await ask(http, random_prompt(7, 40), 1)).status_code == 200
        await long
        await settled(cluster)
        assert computed.snapshot()["prefill_tokens_total"] < 1240 + 10 * 500
