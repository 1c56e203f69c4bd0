"""The HTTP server: uvicorn, inside the loop and the life of a service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from common.errors import ConfigError
from services.frontend.outlet import OutletProtocol

BACKLOG = 2_048
#: Seconds that answers have to go out once the server stops.
LAST_WORDS_S = 2
#: Seconds that an idle connection is kept: longer than clients keep theirs, so that it is they who close.
KEEP_ALIVE_S = 75


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's business."""
        yield


class HttpServer:
    """Listens from bind() on, answers from start() on."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Take the port (0: any); returns the URL. ConfigError if it cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            where = f"[{self._host}]:{self._port}" if family is socket.AF_INET6 else f"{self._host}:{self._port}"
            reason = error.strerror or error
            raise ConfigError(f"cannot listen on {where}: {reason}; set frontend.host and frontend.port") from None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if family is socket.AF_INET6 else f"http://{host}:{port}"

    def start(self, app: ASGIApp, on_failure: Callable[[BaseException], None]) -> None:
        """Answer with app. on_failure: told if the server ends by itself."""
        assert self._socket is not None, "not bound"
        config = uvicorn.Config(
            app,
            http=OutletProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_failure(error)

        self._serving.add_done_callback(ended)

    async def stop(self) -> None:
        """Take no more connections, let answers in hand go out, close everything. Idempotent."""
        if self._serving is not None and self._server is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
