"""Every failure in the form of the OpenAI API: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from common.errors import DualPathError, ErrorCode

#: Seconds after which a client may try again when we are full, draining or without engines.
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
#: Where the ASGI scope has the request's id, as the client knows it.
REQUEST_ID = "dualpath.request_id"
#: The HTTP status of each failure; what is not here is 500.
STATUS = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.NO_ENGINES: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.ENGINE_LOST: 503,
    ErrorCode.PREEMPTED: 503,
    ErrorCode.MOVED: 503,
    ErrorCode.STRANGER: 503,
    ErrorCode.UNREACHABLE: 503,
    ErrorCode.DEADLINE: 504,
}


class ApiError(Exception):
    """The client's mistake. param: the field that is wrong, dotted, or None if it is not one field. headers: what goes
    with the answer."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.headers = headers


def status_of(error: DualPathError) -> int:
    return STATUS.get(error.code, 500)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object, as a whole response or as an event in a stream."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_body(error: DualPathError) -> dict[str, Any]:
    """The error object of a failure inside the cluster; its code is ours."""
    return error_body(status_of(error), error.message, code=error.code.value)


def _answer(request: Request, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """With the request's id, once it has one: what people need who ask why."""
    request_id = request.scope.get(REQUEST_ID)
    named = {"X-Request-Id": request_id} if request_id else {}
    return JSONResponse(body, status, {**(headers or {}), **named})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body = error_body(error.status, error.message, error.param, error.code)
    return _answer(request, body, error.status, error.headers)


async def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, DualPathError)
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return _answer(request, failure_body(error), status, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _answer(request, error_body(error.status_code, message), error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_defect(request: Request, error: Exception) -> Response:
    """The server logs the exception itself; the client learns no more than that there was one."""
    return _answer(request, error_body(500, "internal error", code=ErrorCode.INTERNAL.value), 500)


HANDLERS: dict[Any, ExceptionHandler] = {
    ApiError: _on_api_error,
    DualPathError: _on_failure,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
    Exception: _on_defect,
}
