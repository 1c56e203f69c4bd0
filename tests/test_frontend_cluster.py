"""Over HTTP through a real cluster: the reference's tokens, honest usage, a death in the middle, nothing left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.engine.torch_backend.reference import Reference
from services.frontend.service import Frontend
from tests.cluster import Cluster, cluster_config, run_cluster
from tests.frontend_harness import events_of


@asynccontextmanager
async def serve(model: Path, blocks: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    sizes = {name: settings.pop(name) for name in ("prefill", "decode") if name in settings}
    async with run_cluster(cluster_config(model, blocks, **settings), driver=False, **sizes) as cluster:
        frontend = Frontend(cluster.config, "frontend")
        try:
            await frontend.start()
            async with httpx.AsyncClient(base_url=frontend.url, timeout=30) as http:
                yield cluster, http
            async with asyncio.timeout(5):
                while len(frontend.requests):
                    await asyncio.sleep(0.01)
        finally:
            await frontend.stop(drain=False)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=length)


def body_of(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **asked, **more}


async def complete(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Tokens and usage, streamed or not."""
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        answer = response.json()
        return answer["choices"][0]["token_ids"], answer["usage"]
    *chunks, last, done = events_of(response.text)
    assert done == "[DONE]"
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]], last["usage"]


@pytest.mark.parametrize("read_side", ["pe_only", "de_only"])
async def test_turns_equal_the_reference_streamed_and_not(
    model: Path, reference: Reference, tmp_path: Path, read_side: str
) -> None:
    async with serve(model, tmp_path, scheduler__read_side=read_side) as (_, http):
        prompt = prompt_of(150, 1)
        for hit, length in ((0, 1), (128, 70), (192, 2), (192, 64)):
            expected = reference.greedy(prompt, length)
            for stream in (False, True):
                options = {"stream_options": {"include_usage": True}} if stream else {}
                tokens, usage = await complete(http, body_of(prompt, length, stream=stream, **options))
                assert tokens == expected
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), length)
                assert usage["prompt_tokens_details"]["cached_tokens"] == (hit if not stream else max(hit, 128))
            prompt += expected


async def test_a_decode_engine_that_dies_costs_no_token(model: Path, reference: Reference, tmp_path: Path) -> None:
    """The stream goes on with the engine that is left, from the tokens that the client has."""
    async with serve(model, tmp_path, decode=2) as (cluster, http):
        prompt = prompt_of(100, 2)
        tokens: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body_of(prompt, 120, stream=True)) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
                if len(tokens) == 10:
                    [busy] = [name for name in ("decode-0", "decode-1") if cluster.engines[name].load()[0]]
                    await cluster.engines.pop(busy).stop(drain=False)
                    await cluster.traffic_managers.pop(busy).stop(drain=False)
        assert tokens == reference.greedy(prompt, 120)


async def test_a_client_that_leaves_frees_everything(model: Path, tmp_path: Path) -> None:
    body = body_of(prompt_of(100, 3), 900, stream=True)
    async with serve(model, tmp_path) as (cluster, http):
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        await cluster.quiet()
