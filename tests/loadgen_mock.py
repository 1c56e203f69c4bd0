"""A mock completions server on raw asyncio streams: the test decides every byte and when it is sent.

Token i after a prompt is known beforehand (expected_tokens), so that histories can be checked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT = 4096


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the mock model generates."""
    seed = sum(prompt) + len(prompt)
    return [(seed + 7 * i) % 50_000 for i in range(count)]


class Reply:
    """The body of one streamed answer, in HTTP chunks."""

    def __init__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.prompt: list[int] = body["prompt"]
        self.max_tokens: int = body["max_tokens"]
        self.tokens = expected_tokens(self.prompt, self.max_tokens)
        self.writer = writer

    async def start(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, payload: dict[str, Any] | str) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.raw(f"data: {text}\n\n".encode())

    async def token(self, index: int) -> None:
        await self.event(token_event([self.tokens[index]]))

    async def usage(self, generated: int | None = None, cached: int = 0, prompt: int | None = None) -> None:
        await self.event(usage_event(len(self.prompt) if prompt is None else prompt,
                                     self.max_tokens if generated is None else generated, cached))

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()


def token_event(tokens: list[int], text: str = "x", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": tokens, "finish_reason": finish}]}


def usage_event(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "prompt_tokens_details": details}
    return {"choices": [], "usage": counts}


async def answer_well(reply: Reply) -> None:
    """Every token at once, one event each; everything but the last token's block of the prompt was cached."""
    await reply.start()
    for index in range(reply.max_tokens):
        await reply.token(index)
    await reply.usage(cached=(len(reply.prompt) - 1) // 64 * 64)
    await reply.event("[DONE]")
    await reply.end()


class MockServer:
    """Serves until closed. bodies: every completion request, in order of arrival; open_now and peak: concurrency."""

    def __init__(self, answer: Callable[[Reply], Awaitable[None]] = answer_well) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.open_now = 0
        self.peak = 0
        self.url = ""

    async def __aenter__(self) -> MockServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                sizes = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
                body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes else {}
                await self._route(path, body, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _route(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/completions":
            self.bodies.append(body)
            self.open_now += 1
            self.peak = max(self.peak, self.open_now)
            try:
                await self.answer(Reply(body, writer))
            finally:
                self.open_now -= 1
        elif path == "/v1/models":
            await _json(writer, {"data": [{"id": "mock", "max_model_len": LIMIT}]})
        elif path == "/tokenize":
            tokens = [len(word) * 1000 + sum(word.encode()) % 1000 for word in body["prompt"].split()]
            await _json(writer, {"tokens": tokens})
        else:
            await _json(writer, {"error": {"message": f"no {path} here"}}, "404 Not Found")


async def _json(writer: asyncio.StreamWriter, payload: dict[str, Any], status: str = "200 OK") -> None:
    body = json.dumps(payload).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
