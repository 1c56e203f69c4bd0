"""Health and metrics of one process over HTTP: /live, /ready, /health, /metrics.

Served by the process's own event loop, so that a loop that hangs answers nobody; the exposition is written in a thread.
Only GET and HEAD, one request a connection, all of it bounded in size, number and time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from common.errors import ConfigError

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8 << 10
#: Seconds that a client has to send its request and to take the answer.
EXCHANGE_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: an HTTP status, a body and its media type."""

    status: int
    body: bytes
    media_type: str = "application/json"


Page = Callable[[], Awaitable[Answer]]
"""Makes the answer to one path. Must be quick: it runs in the loop that serves everything else."""


def json_answer(status: int, value: Mapping[str, Any]) -> Answer:
    return Answer(status, json.dumps(value).encode() + b"\n")


class HealthServer:
    """Listens from start() to close(). port 0: any free one."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.url = ""
        self._host = host
        self._port = port
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._exchanges: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """ConfigError if the address cannot be had."""
        try:
            self._server = await asyncio.start_server(self._connected, self._host, self._port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            where = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
            detail = f"cannot listen on {where}: {error.strerror or error}; set health.host and health.port"
            raise ConfigError(detail) from None
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Idempotent; answers that are being sent are cut short."""
        if self._server is not None:
            self._server.close()
        for exchange in list(self._exchanges):
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._exchanges) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        exchange = asyncio.create_task(self._exchange(reader, writer), name="health")
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                method, answer = await self._answer(reader)
                writer.write(_response(answer, with_body=method != "HEAD"))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client's business
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        """The request's method, and what to say."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "GET", _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", _refusal(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return method, _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        page = self._pages.get(target.partition("?")[0])
        return method, _refusal(HTTPStatus.NOT_FOUND) if page is None else await page()


def _refusal(status: HTTPStatus) -> Answer:
    return json_answer(status, {"error": status.phrase})


def _response(answer: Answer, with_body: bool) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.media_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + (answer.body if with_body else b"")
