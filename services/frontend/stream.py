"""Server-sent events, each sent the moment there is something to say, for as long as the client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import DualPathError, ErrorCode
from common.log import get_logger
from services.frontend.errors import failure_body
from services.frontend.requests import ClientRequest
from services.frontend.responses import Answer
from services.frontend.updates import Update

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # dumps() would build one each time


def sse(event: dict[str, Any]) -> bytes:
    """One event. Compact JSON has no line end, so the event is one line."""
    return b"data: " + _to_json(event).encode() + b"\n\n"


class EventStream(Response):
    """The output of a request from its first update on. An error is its last event; only success ends with [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, client: ClientRequest, first: Update, answer: Answer) -> None:
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._client = client
        self._first = first
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientDisconnect):  # nobody is left to be told
            await unless_gone(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        try:
            update = self._first
            await self._send_event(send, sse(self._answer.chunk(update, self._client.usage)))
            while update.finish_reason is None:
                update = await self._client.next_update()
                await self._send_event(send, sse(self._answer.chunk(update, self._client.usage)))
            if self._answer.include_usage:
                await self._send_event(send, sse(self._answer.usage_chunk(self._client.usage)))
            await self._send_event(send, DONE)
        except DualPathError as error:
            await self._send_event(send, sse(failure_body(error)))
        except Exception as error:
            get_logger().error("stream failed", request=self._client.request_id, exc_info=error)
            await self._send_event(send, sse(failure_body(DualPathError(ErrorCode.INTERNAL, "internal error"))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work. If the client goes away before, work is cancelled and ClientDisconnect raised."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
