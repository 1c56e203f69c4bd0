"""Tokens of a stream go straight from the message that brings them to the client's connection."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.config import load_config
from common.messages import Token, Tokens
from common.types import FinishReason
from common.watchdog import NAME
from services.frontend.client_request import ClientRequest
from services.frontend.outlet import Outlet
from services.frontend.responses import Answer
from services.frontend.stream import EventStream
from tests.frontend_harness import (
    Attempt,
    FakeCluster,
    Served,
    encode,
    events_of,
    front_end_process,
    serve,
    text_of,
    write_model,
    write_tools_model,
)

STREAMS, STEPS = 32, 200
LIMIT = 4_096


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, str]]:
    cluster = FakeCluster()
    await cluster.start()
    model = write_model(tmp_path / "tiny")
    settings = {"model.path": str(model), "frontend.port": 0, "scheduler.control": cluster.scheduler.endpoint}
    try:
        async with front_end_process(load_config(overrides=settings)) as (url, _):
            yield cluster, url
    finally:
        await cluster.close()


async def callbacks(http: httpx.AsyncClient) -> float:
    """How many the event loop of the front end has run so far."""
    text = (await http.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"dualpath_{NAME}_count":
                return sample.value
    raise AssertionError("no such metric")


async def test_a_step_of_many_streams_is_few_callbacks(child: tuple[FakeCluster, str]) -> None:
    """Of the event loop, which costs more than what it is to do for a token."""
    cluster, url = child
    waiting: list[Attempt] = []
    counted: list[float] = []

    async def script(attempt: Attempt) -> None:
        attempt.started(0)
        waiting.append(attempt)
        if len(waiting) < STREAMS:
            return
        async with httpx.AsyncClient(base_url=url) as http:
            for step in range(STEPS):
                if step in (5, STEPS - 5):
                    await asyncio.sleep(0.1)
                    counted.append(await callbacks(http))
                attempt.link.send(Tokens([Token(each.request.request_id, 0, step, 70) for each in waiting]))
                await asyncio.sleep(0.005)
        for each in waiting:
            each.finished(STEPS)

    cluster.script = script
    body = {"prompt": "x", "max_tokens": STEPS, "stream": True, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(STREAMS)))
    for answer in answers:
        *events, done = events_of(answer.text)
        assert done == "[DONE]"
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == [70] * STEPS
    assert counted[1] - counted[0] < STREAMS * (STEPS - 10) / 2


async def test_a_client_that_rests_in_the_middle_gets_everything_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events wait for it while it does not read, and go straight again once it does."""
    model, count, made = write_tools_model(tmp_path / "long", LIMIT), LIMIT // 4, 0
    letters = encode("abcdefghij")

    async def script(attempt: Attempt) -> None:
        nonlocal made
        for index in range(count):
            attempt.tokens([letters[index % 10]], index)
            made += 1
            await asyncio.sleep(0.001)
        attempt.finished(count)

    free: list[bool] = []

    def seen(outlet: Outlet) -> bool:
        free.append(not outlet._cycle.flow.write_paused)
        return free[-1]

    monkeypatch.setattr(Outlet, "free", seen)
    async with serve(model, LIMIT) as served:
        listening = served.frontend._server._socket
        assert listening is not None
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what it accepts has that, too
        served.cluster.script = script
        body = {"prompt": "x", "max_tokens": count, "stream": True, "logprobs": 20, "return_token_ids": True}
        content = json.dumps(body).encode()
        target = httpx.URL(served.frontend.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((target.host, target.port))
            connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
            head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            answer = b""
            while piece := await reader.read(1 << 16):
                answer += piece
                while count // 4 < made < count // 2:
                    await asyncio.sleep(0.01)
            writer.close()
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    tokens = [token for line in lines for token in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert tokens == [letters[index % 10] for index in range(count)]
    assert len(lines) < count
    assert {(True, True), (True, False), (False, True)} <= set(pairwise(free)), len(answer)
    assert answer.count(b"data: [DONE]") == 1


async def test_a_stop_string_ends_the_stream_at_once(served: Served) -> None:
    async def script(attempt: Attempt) -> None:
        for index, token in enumerate(encode("abENDcd")):
            attempt.tokens([token], index)
            await asyncio.sleep(0.02)

    served.cluster.script = script
    async with asyncio.timeout(5):
        *events, done = await served.stream(stop="END", return_token_ids=True)
    assert done == "[DONE]" and text_of(events) == "ab"
    assert [event["choices"][0]["finish_reason"] for event in events] == [*[None] * 4, "stop"]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == encode("abEND")
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 1)
    await served.ended()
    assert served.metric("requests_total{outcome=stop}") == 1


async def test_a_defect_in_the_middle_is_an_error_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, calls = Answer.chunk, 0

    def broken(*arguments: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("secret detail")
        return chunk(*arguments)

    async def script(attempt: Attempt) -> None:
        for index, token in enumerate(encode("abcd")):
            attempt.tokens([token], index)
            await asyncio.sleep(0.02)

    monkeypatch.setattr(Answer, "chunk", broken)
    served.cluster.script = script
    events = await served.stream()
    assert text_of(events[:-1]) == "ab"
    assert events[-1]["error"]["message"] == "internal error"
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 1)
    await served.ended()


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_has_been_streamed_is_freed_without_a_collection(served: Served, leaves: bool) -> None:
    """Full collections wait for a calm moment (common.collector)."""

    async def script(attempt: Attempt) -> None:
        for index, token in enumerate(encode("abcd")):
            attempt.tokens([token], index)
            await asyncio.sleep(0.01)
        if not leaves:
            attempt.finished(4, FinishReason.LENGTH)

    served.cluster.script = script
    body = {"prompt": "x", "max_tokens": 64, "stream": True}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            async with (
                httpx.AsyncClient(base_url=served.frontend.url) as http,
                http.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for line in response.aiter_lines():
                    if leaves and '"d"' in line:
                        break
        await served.ended()
        await asyncio.sleep(0.05)
        kinds = (ClientRequest, EventStream, Outlet, RequestResponseCycle)
        kept = [each for each in gc.get_objects() if isinstance(each, kinds)]
    finally:
        gc.enable()
    assert kept == []
