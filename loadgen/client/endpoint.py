"""Streaming client of an OpenAI-compatible endpoint: token ids in, token ids and their times out.

One call is one HTTP request: nothing is retried, and nothing queues for a connection here. A call never raises for what
the server does; it says what went wrong.

Each call in flight has an HTTP client of its own, with one connection, from a stack of idle ones. One shared client
would search all its connections at every event of any of them: at 300 streams that delays tokens by seconds.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.clock import monotonic
from common.errors import ConfigError
from loadgen.client.prompt import History
from loadgen.client.sse import Event, EventParser

REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
#: Less than the 5 s after which common servers drop an idle connection, so that no request meets a closing one.
KEEPALIVE_S = 2.0
#: Descriptors beside the connections: files, the event loop, libraries.
SPARE_DESCRIPTORS = 64
#: The text is tokenized in pieces, so that the server need not take it as one body.
TEXT_PIECE_CHARS = 64 << 10

_JSON = {"Content-Type": "application/json"}
_ENDED_BADLY = ("error", "abort", "cancelled")


class Failure(StrEnum):
    """Why a turn has no latency (case E12)."""

    CONNECTION = "connection"        # refused, reset, closed in the middle of a message
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"      # any status but 200
    ERROR_EVENT = "error_event"      # status 200, then an error in the stream, or a finish reason that means one
    TRUNCATED = "truncated"          # the stream ended without [DONE]
    MALFORMED = "malformed"          # a stream that cannot be read, or without token ids
    NO_TOKENS = "no_tokens"          # a well-formed stream without a single token


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What GET /v1/models says of the first model; limit: its context in tokens, None if the server does not say."""

    name: str
    limit: int | None


@dataclass(slots=True)
class Completion:
    """One call. Times are monotonic seconds; times[i] is when tokens[i] arrived (tokens of one event share it).

    ended: when the client knew that it was over. Usage counts are None where the server sent none, and parts (seconds
    of the time to first token, by what they were spent on) is empty.
    """

    started: float
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""

    def fail(self, failure: Failure, detail: str) -> None:
        self.failure = failure
        self.detail = detail


class Client:
    """An HTTP client for one server. Use as an async context manager. ConfigError for a URL that is none.

    request_timeout_s: how long a call may take in all.
    """

    def __init__(self, url: str, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not a URL: write, say, http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._request_timeout_s = request_timeout_s
        self._every: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in self._every:
            await http.aclose()

    @contextmanager
    def _connection(self) -> Iterator[httpx.AsyncClient]:
        """An HTTP client for one call. The one used last comes first: its connection is the likeliest to be open."""
        http = self._idle.pop() if self._idle else self._open()
        try:
            yield http
        finally:
            self._idle.append(http)

    def _open(self) -> httpx.AsyncClient:
        http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(self._request_timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            headers={"Accept-Encoding": "identity"},
            verify=_certificates(),
            trust_env=False,  # a proxy from the environment would be what is measured
        )
        self._every.append(http)
        return http

    async def model(self) -> ServedModel:
        """The model that the server serves. ConfigError if there is no such server."""
        answer = await self._json("GET", "/v1/models")
        try:
            model = answer["data"][0]
            name, limit = model["id"], model.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigError(f"{self.url}/v1/models lists no model: is it an OpenAI-compatible server?") from None
        return ServedModel(str(name), int(limit) if limit is not None else None)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. ConfigError if the server cannot."""
        tokens: list[int] = []
        for start in range(0, len(text), TEXT_PIECE_CHARS):
            body = {"prompt": text[start : start + TEXT_PIECE_CHARS], "add_special_tokens": False}
            answer = await self._json("POST", "/tokenize", body)
            try:
                tokens += [int(token) for token in answer["tokens"]]
            except (KeyError, TypeError, ValueError):
                raise ConfigError(f"{self.url}/tokenize did not answer with a list of tokens") from None
        return tokens

    async def complete(
        self,
        model: str,
        prompt: History,
        max_tokens: int,
        hit_tokens: int | None = None,
        into: Completion | None = None,
    ) -> Completion:
        """Generate greedily exactly max_tokens tokens after prompt.

        hit_tokens: how much of the prompt the server has in storage, where the client is to tell. into: a fresh one to
        fill in, for who wants to know what had come when the call was cancelled.
        """
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if hit_tokens is not None:
            body["hit_tokens"] = hit_tokens
        content = b'{"prompt":%b,%b' % (prompt.json(), json.dumps(body).encode()[1:])
        result = into or Completion(started=monotonic())
        try:
            async with asyncio.timeout(self._request_timeout_s):
                with self._connection() as http:
                    async with http.stream("POST", "/v1/completions", content=content, headers=_JSON) as response:
                        await _read(response, result)
        except (TimeoutError, httpx.TimeoutException) as error:
            result.fail(Failure.TIMEOUT, type(error).__name__)
        except (httpx.HTTPError, OSError) as error:
            if not result.ended:  # how a connection closes after [DONE] is of no interest
                result.fail(Failure.CONNECTION, str(error) or type(error).__name__)
        if result.failure is None and not result.tokens:
            result.fail(Failure.NO_TOKENS, "the stream ended well without a token")
        result.ended = result.ended or monotonic()
        return result

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            with self._connection() as http:
                response = await http.request(method, path, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(f"cannot reach {self.url} ({reason}): start the server, or correct --url") from None
        if response.status_code != 200:
            raise ConfigError(f"{self.url}{path} answered {response.status_code}: {_message(response.content)}")
        try:
            return response.json()
        except ValueError:
            raise ConfigError(f"{self.url}{path} did not answer with JSON: correct --url") from None


async def _read(response: httpx.Response, result: Completion) -> None:
    """Take in the events of one answer. result.ended is set at [DONE]; what follows no longer matters."""
    if response.status_code != 200:
        result.fail(Failure.HTTP_STATUS, f"{response.status_code}: {_message(await response.aread())}")
        return
    parser = EventParser()
    async for chunk in response.aiter_bytes():
        now = monotonic()
        try:
            for event in parser.feed(chunk):
                if event.data == b"[DONE]":
                    result.ended = now
                elif not result.ended:
                    _take(event, now, result)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            result.fail(Failure.MALFORMED, f"unreadable event: {error}")
        if result.failure is not None:
            return
    if not result.ended:
        result.fail(Failure.TRUNCATED, f"the stream ended after {len(result.tokens)} tokens without [DONE]")


def _take(event: Event, now: float, result: Completion) -> None:
    """Add one event to the result. Only an event with token ids is a token (cases E01, E12)."""
    payload = json.loads(event.data)
    if "error" in payload or event.name == "error":
        result.fail(Failure.ERROR_EVENT, _message(event.data))
        return
    usage = payload.get("usage")
    if usage:
        result.prompt_tokens = usage.get("prompt_tokens")
        result.completion_tokens = usage.get("completion_tokens")
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        result.parts = {name: float(seconds) for name, seconds in (usage.get("timing") or {}).items()}
    for choice in payload.get("choices", []):
        tokens = choice.get("token_ids")
        if tokens:
            result.tokens += [int(token) for token in tokens]
            result.times += [now] * len(tokens)
        elif choice.get("text") and tokens is None:
            result.fail(Failure.MALFORMED, "text without token ids: the server does not know return_token_ids")
        if choice.get("finish_reason") in _ENDED_BADLY:
            result.fail(Failure.ERROR_EVENT, f"finish reason {choice['finish_reason']!r}")


def _message(body: bytes) -> str:
    """The message of an error body in the OpenAI form, else its first characters."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no message"


@cache
def _certificates() -> ssl.SSLContext:
    """The machine's certificates, read once: it takes longer than a short request."""
    return ssl.create_default_context()


def ensure_descriptors(connections: int) -> None:
    """Make sure that so many connections can be open at once: raise the soft limit, or ConfigError (case E11)."""
    needed = connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{connections} connections need {needed} file descriptors, the limit is {hard}: raise it (ulimit -n) "
            "or ask for fewer agents"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
