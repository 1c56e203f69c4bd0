"""Server-sent events, each sent the moment there is something to say, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import DualPathError, ErrorCode
from common.log import get_logger
from services.frontend.errors import failure_body
from services.frontend.generation import Generation
from services.frontend.outlet import Outlet
from services.frontend.responses import Answer
from services.frontend.updates import Sink, Update

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def sse(event: bytes) -> bytes:
    """One event. event: compact JSON, which has no line end, so that the event is one line."""
    return b"data: " + event + b"\n\n"


class EventStream(Response):
    """The output of a call from its first update on. An error is its last event; only success ends with [DONE].

    request_id: for the log. outlet: of this answer, where its server has them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: tuple[int, Update],
        answer: Answer,
        request_id: str,
        outlet: Outlet | None,
    ) -> None:
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._first = first
        self._answer = answer
        self._request_id = request_id
        self._outlet = outlet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientDisconnect):  # nobody is left to be told
            await unless_gone(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        generation, answer = self._generation, self._answer
        try:
            if self._outlet is not None:
                generation.straight(Sink(self._outlet.free, partial(self._write, self._outlet)))
            index, update = self._first
            while True:
                await send(_body(self._event(index, update)))
                if generation.ended:
                    break
                index, update = await generation.next_update()
            if answer.include_usage:
                await send(_body(sse(answer.usage_chunk(generation.usage))))
            await send(_body(DONE))
        except DualPathError as error:
            await send(_body(sse(to_json(failure_body(error)))))
        except Exception as error:
            get_logger().error("stream failed", request=self._request_id, exc_info=error)
            await send(_body(sse(to_json(failure_body(DualPathError(ErrorCode.INTERNAL, "internal error"))))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, index: int, update: Update) -> bytes:
        usage = self._generation.usage if self._answer.continuous_usage else None
        return sse(self._answer.chunk(index, update, usage))

    def _write(self, outlet: Outlet, update: Update) -> None:
        outlet.write(self._event(0, update))


def _body(event: bytes) -> Message:
    return {"type": "http.response.body", "body": event, "more_body": True}


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
