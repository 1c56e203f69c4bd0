"""The streaming client against a server that decides every byte (cases E01, E08, E11, E12, E20, E21)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from common.errors import ConfigError
from loadgen.client.endpoint import Client, Completion, Failure
from loadgen.client.prompt import History
from loadgen.replay.agent import violations
from tests.loadgen_mock import LIMIT, MockServer, Reply, answer_well, expected_tokens, token_event, usage_event

PROMPT = list(range(100, 230))


async def ask(server: MockServer, max_tokens: int = 4) -> Completion:
    async with Client(server.url) as client:
        return await client.complete("mock", History(PROMPT), max_tokens)


async def test_well_formed_answer() -> None:
    async with MockServer() as server:
        answer = await ask(server)
    assert answer.failure is None
    assert answer.tokens == expected_tokens(PROMPT, 4)
    assert len(answer.times) == 4
    assert answer.started < answer.times[0] <= answer.times[-1] <= answer.ended
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (130, 128, 4)
    assert violations(answer, 130, 4) == []


async def test_e20_token_ids_and_exact_length_are_asked_for() -> None:
    async with MockServer() as server:
        await ask(server, 7)
    assert server.bodies == [
        {
            "model": "mock",
            "prompt": PROMPT,
            "max_tokens": 7,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]


async def test_e01_only_tokens_are_tokens() -> None:
    async def answer(reply: Reply) -> None:
        await reply.start()
        await reply.event(token_event([], text=""))
        await asyncio.sleep(0.2)
        await reply.token(0)
        await reply.token(1)
        await asyncio.sleep(0.1)
        await reply.usage()
        await reply.event("[DONE]")
        await reply.end()

    async with MockServer(answer) as server:
        result = await ask(server, 2)
    assert len(result.tokens) == 2
    assert 0.195 < result.times[0] - result.started < 0.7
    assert result.ended - result.times[-1] > 0.095, "the usage event is not the last token"


async def test_several_tokens_in_one_event_share_its_time() -> None:
    async def answer(reply: Reply) -> None:
        await reply.start()
        await reply.event(token_event(reply.tokens[:3]))
        await reply.event(token_event(reply.tokens[3:], finish="length"))
        await reply.event("[DONE]")
        await reply.end()

    async with MockServer(answer) as server:
        result = await ask(server, 4)
    assert result.tokens == expected_tokens(PROMPT, 4)
    assert result.times[0] == result.times[2]


@pytest.mark.parametrize("piece", [1, 2, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_e08_split_anywhere(piece: int, end: str) -> None:
    async def answer(reply: Reply) -> None:
        events = [json.dumps(token_event([token], text="größe 🙂"), ensure_ascii=False) for token in reply.tokens]
        events += [json.dumps(usage_event(len(reply.prompt), len(reply.tokens), 64)), "[DONE]"]
        lines = [f": ping{end}{end}"] + [f"data:{event}{end}{end}" for event in events]
        stream = "".join(lines).encode()
        await reply.start()
        for start in range(0, len(stream), piece):
            await reply.raw(stream[start : start + piece])
        await reply.end()

    async with MockServer(answer) as server:
        result = await ask(server, 3)
    assert result.failure is None
    assert result.tokens == expected_tokens(PROMPT, 3)
    assert result.cached_tokens == 64


async def overloaded(reply: Reply) -> None:
    await reply.start("503 Service Unavailable", "application/json")
    await reply.raw(b'{"error": {"message": "queue is full", "code": "overloaded"}}')
    await reply.end()


async def error_event(reply: Reply) -> None:
    await reply.start()
    await reply.token(0)
    await reply.event({"error": {"message": "engine lost", "code": "engine_lost"}})
    await reply.event("[DONE]")
    await reply.end()


async def named_error_event(reply: Reply) -> None:
    await reply.start()
    await reply.raw(b'event: error\ndata: {"message": "engine lost"}\n\n')
    await reply.end()


async def finished_with_error(reply: Reply) -> None:
    await reply.start()
    await reply.token(0)
    await reply.event(token_event([], text="", finish="error"))
    await reply.event("[DONE]")
    await reply.end()


async def truncated(reply: Reply) -> None:
    await reply.start()
    for index in range(reply.max_tokens):
        await reply.token(index)
    await reply.end()


async def reset(reply: Reply) -> None:
    await reply.start()
    await reply.token(0)
    reply.reset()


async def refused(reply: Reply) -> None:
    reply.reset()


async def not_json(reply: Reply) -> None:
    await reply.start()
    await reply.event("{oops")
    await reply.end()


async def wrong_types(reply: Reply) -> None:
    await reply.start()
    await reply.event({"choices": [{"token_ids": "abc"}]})
    await reply.end()


async def text_only(reply: Reply) -> None:
    await reply.start()
    await reply.event({"choices": [{"index": 0, "text": "hello"}]})
    await reply.event("[DONE]")
    await reply.end()


async def no_tokens(reply: Reply) -> None:
    await reply.start()
    await reply.usage(generated=0)
    await reply.event("[DONE]")
    await reply.end()


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    [
        (overloaded, Failure.HTTP_STATUS, "503: queue is full"),
        (error_event, Failure.ERROR_EVENT, "engine lost"),
        (named_error_event, Failure.ERROR_EVENT, "engine lost"),
        (finished_with_error, Failure.ERROR_EVENT, "'error'"),
        (truncated, Failure.TRUNCATED, "after 4 tokens"),
        (reset, Failure.CONNECTION, ""),
        (refused, Failure.CONNECTION, ""),
        (not_json, Failure.MALFORMED, "unreadable"),
        (wrong_types, Failure.MALFORMED, "unreadable"),
        (text_only, Failure.MALFORMED, "return_token_ids"),
        (no_tokens, Failure.NO_TOKENS, "without a token"),
    ],
)
async def test_e12_failure_is_named_and_never_retried(answer, failure: Failure, detail: str) -> None:
    async with MockServer(answer) as server:
        result = await ask(server)
    assert result.failure is failure
    assert detail in result.detail
    assert len(server.bodies) == 1
    assert result.ended >= result.started
    assert violations(result, 130, 4) == []


async def test_server_that_never_answers() -> None:
    async def hang(reply: Reply) -> None:
        await reply.start()
        await asyncio.sleep(5)

    async with MockServer(hang) as server, Client(server.url, request_timeout_s=0.1) as client:
        result = await client.complete("mock", History(PROMPT), 4)
    assert result.failure is Failure.TIMEOUT


async def test_connection_lost_after_done_is_no_failure() -> None:
    async def answer(reply: Reply) -> None:
        await reply.start()
        for index in range(reply.max_tokens):
            await reply.token(index)
        await reply.event("[DONE]")
        await asyncio.sleep(0.05)
        reply.reset()

    async with MockServer(answer) as server:
        result = await ask(server)
    assert result.failure is None
    assert len(result.tokens) == 4


async def test_e21_other_lengths_are_violations() -> None:
    async def short(reply: Reply) -> None:
        await reply.start()
        await reply.token(0)
        await reply.usage(generated=2, prompt=131)
        await reply.event("[DONE]")
        await reply.end()

    async with MockServer(short) as server:
        result = await ask(server)
    assert result.failure is None
    assert violations(result, 130, 4) == [
        "generated 1 tokens instead of 4",
        "usage counts 2 generated tokens, 1 arrived",
        "usage counts 131 prompt tokens, 130 were sent",
    ]


async def test_e11_no_cap_on_connections() -> None:
    everybody = asyncio.Event()

    async def answer(reply: Reply) -> None:
        if server.open_now == 300:
            everybody.set()
        async with asyncio.timeout(10):
            await everybody.wait()
        await answer_well(reply)

    async with MockServer(answer) as server, Client(server.url) as client:
        answers = await asyncio.gather(*(client.complete("mock", History([i]), 2) for i in range(300)))
    assert server.peak == 300
    assert [answer.failure for answer in answers] == [None] * 300


def test_e11_too_few_descriptors_is_a_start_up_error() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 256));"
        "from loadgen.client.endpoint import ensure_descriptors as ensure;"
        "ensure(150); print(resource.getrlimit(resource.RLIMIT_NOFILE));"
        "ensure(300)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "(214, 256)", "the soft limit is raised where the hard one allows"
    assert "ConfigError: 300 connections need 364 file descriptors, the limit is 256" in done.stderr


async def test_connections_are_used_again() -> None:
    async with MockServer() as server, Client(server.url) as client:
        for _ in range(5):
            assert (await client.complete("mock", History([1]), 2)).failure is None
        assert server.connections == 1


async def test_model_and_tokens_of_the_server() -> None:
    async with MockServer() as server, Client(server.url + "/v1/") as client:
        model = await client.model()
        assert (model.name, model.limit) == ("mock", LIMIT)
        started = time.monotonic()
        tokens = await client.tokenize("alpha beta " * 20_000)
        assert len(tokens) >= 40_000
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "nonsense"])
def test_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        Client(url)


async def test_server_without_tokenize(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MockServer() as server, Client(server.url) as client:
        with pytest.raises(ConfigError, match="answered 404: no /nowhere here"):
            await client._json("POST", "/nowhere", {})
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ConfigError, match=r"cannot reach http://127.0.0.1:9 .*start the server"):
            await client.model()
