"""Control-plane messaging: ROUTER/DEALER with calls, one-way messages, bounded queues and optional CURVE.

A Node is a process's one place on the control plane: a ROUTER that others connect to, and a Link (DEALER) to each peer
that it talks to. Handlers are registered by message type; a plain function runs in order of arrival, a coroutine
function runs as a task of its own. A handler's return value answers a call. Frames that are not well-formed messages
are counted and dropped.

Frames: [kind, call id, message] (a ROUTER adds the peer's identity in front). Never REQ/REP, never pickle.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from common.config import SecurityConfig, endpoint_host, is_loopback
from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Faults
from common.latest import REMEMBERED, Latest
from common.log import get_logger
from common.metrics import Metrics
from common.wire import MAX_FRAME_BYTES, WireError, decode, encode, message

ONE_WAY, CALL, REPLY, ERROR = b"M", b"C", b"R", b"E"
HIGH_WATER_MARK = 10_000
MAX_HANDLER_TASKS = 8_192
LINGER_MS = 200
#: Seconds for which messages that are there already may be handled one behind the other before others have a turn.
BURST_S = 0.005

Handler = Callable[[Any, "Peer"], Any]


@message
@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The answer to a call that failed."""

    code: ErrorCode
    detail: str


class Peer(Protocol):
    """Somebody to send to. send raises DualPathError UNREACHABLE or OVERLOADED; it never blocks."""

    def send(self, msg: object) -> None: ...


class _Caller:
    """A peer behind our ROUTER, reachable while its DEALER is connected."""

    def __init__(self, node: Node, identity: bytes) -> None:
        self.identity = identity
        self._node = node

    def send(self, msg: object) -> None:
        self._node.send_to(self.identity, msg)


class Link:
    """A DEALER to one peer's ROUTER. Reconnects by itself; calls fail at their deadline."""

    def __init__(self, node: Node, endpoint: str, socket: zmq.asyncio.Socket) -> None:
        self.endpoint = endpoint
        self._node = node
        self._socket = socket
        self._calls: dict[bytes, asyncio.Future[Any]] = {}
        self._next_call = time.monotonic_ns()  # rises over re-made links too: see Node._repeated

    def send(self, msg: object) -> None:
        """One-way, in order with everything else on this link."""
        self._node.post(self._socket, [ONE_WAY, b""], msg)

    async def call(self, msg: object, timeout: float | None) -> Any:
        """The peer's answer. DualPathError: the peer's own; UNREACHABLE after timeout seconds or if the link closes."""
        self._next_call += 1
        call_id = self._next_call.to_bytes(8, "big")
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._node.post(self._socket, [CALL, call_id], msg)
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            detail = f"{self.endpoint} did not answer {type(msg).__name__} within {timeout:g} s"
            raise DualPathError(ErrorCode.UNREACHABLE, detail) from None
        finally:
            self._calls.pop(call_id, None)

    def abandon_calls(self) -> None:
        """Who was asked is gone: calls that wait for an answer fail with MOVED. The link stays, for the next one."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(DualPathError(ErrorCode.MOVED, f"who listened at {self.endpoint} has gone"))

    def _answer(self, kind: bytes, call_id: bytes, msg: Any) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return  # a late answer to a call that was given up
        if kind == ERROR and isinstance(msg, ErrorReply):
            future.set_exception(DualPathError(msg.code, msg.detail))
        else:
            future.set_result(msg)

    def close(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(DualPathError(ErrorCode.UNREACHABLE, f"link to {self.endpoint} closed"))
        self._socket.close(LINGER_MS)


def read_key_pair(directory: str) -> tuple[bytes, bytes]:
    """(public, secret) of the cluster's CURVE certificate. ConfigError if it cannot be read."""
    path = Path(directory) / "cluster.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"security.curve_dir: cannot read {path}: {error}") from None
    if secret is None:
        raise ConfigError(f"security.curve_dir: {path} holds no secret key")
    return public, secret


class Node:
    """This process on the control plane. identity must be unique to this incarnation. ConfigError for unusable keys."""

    def __init__(self, identity: str, security: SecurityConfig, metrics: Metrics, faults: Faults) -> None:
        self.identity = identity
        self.endpoint = ""
        self._security = security
        self._faults = faults
        self._key_pair = read_key_pair(security.curve_dir) if security.curve_dir else None
        self._context = zmq.asyncio.Context()  # one node a process, so one context
        self._handlers: dict[type, Handler] = {}
        self._links: dict[str, Link] = {}
        self._gone: Latest[str] = Latest()
        self._router: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._readers: dict[object, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_call: dict[bytes, bytes] = {}  # of each peer; who called least recently comes first
        self._pending = 0
        self._dropped = metrics.counter("messages_dropped", "Control messages dropped, by reason", ("reason",))
        self._log = get_logger().bind(node=identity)

    def on(self, message_type: type, handler: Handler) -> None:
        """Register the handler of a message type. One each."""
        if message_type in self._handlers:
            raise ValueError(f"{message_type.__name__} already has a handler")
        self._handlers[message_type] = handler

    async def bind(self, endpoint: str) -> str:
        """Listen at tcp://HOST:PORT (port * or 0: any free one); returns the real endpoint. ConfigError if it is taken
        or needs keys."""
        host = endpoint_host(endpoint)
        if self._key_pair is None and not is_loopback(host):
            raise ConfigError(f"{endpoint} is not loopback: set security.curve_dir to a directory with CURVE keys")
        socket = self._socket(zmq.ROUTER, host)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._key_pair is not None:
            public, secret = self._key_pair
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="*", location=self._security.curve_dir)
            socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
        try:
            socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            detail = f"cannot listen on {endpoint}: {error.strerror}; choose another port or stop who has it"
            raise ConfigError(detail) from None
        self._router = socket
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._read(socket, None)
        return self.endpoint

    def link(self, endpoint: str) -> Link:
        """The link to a peer, made on first use. DualPathError UNREACHABLE for one that is gone, or once this node is
        closed."""
        if endpoint not in self._links:
            if self._context.closed:
                raise DualPathError(ErrorCode.UNREACHABLE, "this process is shutting down")
            if endpoint in self._gone:
                raise DualPathError(ErrorCode.UNREACHABLE, f"{endpoint} has left the cluster")
            socket = self._socket(zmq.DEALER, endpoint_host(endpoint))
            socket.setsockopt_string(zmq.IDENTITY, self.identity)
            if self._key_pair is not None:
                public, secret = self._key_pair
                socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
            socket.connect(endpoint)
            link = self._links[endpoint] = Link(self, endpoint, socket)
            self._read(socket, link)
        return self._links[endpoint]

    def unlink(self, endpoint: str) -> None:
        """Close the link to a peer that is gone. What is still meant for it makes no new one, until welcome()."""
        self._gone.add(endpoint)
        link = self._links.pop(endpoint, None)
        if link is not None:
            reader = self._readers.pop(link, None)
            if reader is not None:
                reader.cancel()
            link.close()

    def welcome(self, endpoint: str) -> None:
        """A peer listens there, maybe where another one did."""
        self._gone.discard(endpoint)

    def send_to(self, identity: bytes, msg: object) -> None:
        """One-way to a peer that has connected to us. DualPathError UNREACHABLE if it has not."""
        assert self._router is not None, "not bound"
        self.post(self._router, [identity, ONE_WAY, b""], msg)

    def post(self, socket: zmq.asyncio.Socket, head: list[bytes], msg: object) -> None:
        """Send head + message. Never blocks; DualPathError when the queue to the peer is full or it is unknown."""
        rule = self._faults.strike("message", request=getattr(msg, "request_id", None), type=type(msg).__name__)
        if rule is not None:
            if rule.action == "delay":
                loop = asyncio.get_running_loop()
                loop.call_later(rule.seconds, self._post, socket, [*head, encode(msg)])
                return
            if rule.action == "drop":
                return
            if rule.action == "fail":
                raise DualPathError(ErrorCode.UNREACHABLE, f"{type(msg).__name__} failed by configuration")
            self._post(socket, [*head, encode(msg)])  # duplicate
        self._post(socket, [*head, encode(msg)])

    def _post(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        if socket.closed:
            raise DualPathError(ErrorCode.UNREACHABLE, "the socket is closed")
        if self._pending >= HIGH_WATER_MARK:
            self._dropped.labels("overflow").inc()
            raise DualPathError(ErrorCode.OVERLOADED, "control queue is full")
        future = cast("asyncio.Future[Any]", socket.send_multipart(frames))
        if not future.done():
            self._pending += 1
            future.add_done_callback(self._sent)
        elif future.exception() is not None:
            self._dropped.labels("unreachable").inc()
            raise DualPathError(ErrorCode.UNREACHABLE, f"peer is not connected: {future.exception()}")

    def _sent(self, future: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not future.cancelled() and future.exception() is not None:
            self._dropped.labels("unreachable").inc()

    def _socket(self, kind: int, host: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _read(self, socket: zmq.asyncio.Socket, link: Link | None) -> None:
        self._readers[link or self] = asyncio.create_task(self._reader(socket, link), name=f"read {self.identity}")

    async def _reader(self, socket: zmq.asyncio.Socket, link: Link | None) -> None:
        loop = asyncio.get_running_loop()
        begun = 0.0
        while True:
            coming = cast("asyncio.Future[list[bytes]]", socket.recv_multipart())
            if not coming.done():
                frames = await coming
                begun = loop.time()
            else:  # to wait for it would not let go of the loop
                frames = coming.result()
                if loop.time() - begun > BURST_S:
                    await asyncio.sleep(0)
                    begun = loop.time()
            try:
                identity = frames.pop(0) if link is None else b""
                kind, call_id, payload = frames
                msg = decode(payload)
            except (ValueError, IndexError) as error:  # WireError is a ValueError
                self._dropped.labels("malformed").inc()
                self._log.warning("malformed message dropped", error=str(error))
                continue
            if link is not None and kind in (REPLY, ERROR):
                link._answer(kind, call_id, msg)
            elif kind == ONE_WAY or (kind == CALL and not self._repeated(identity, call_id)):
                self._dispatch(kind, call_id, msg, link or _Caller(self, identity))
            else:
                self._dropped.labels("malformed").inc()

    def _repeated(self, identity: bytes, call_id: bytes) -> bool:
        """A peer numbers its calls in rising order and a link keeps order: an old number is a repeated call."""
        last = self._last_call.pop(identity, b"")
        self._last_call[identity] = max(call_id, last)
        if len(self._last_call) > REMEMBERED:
            del self._last_call[next(iter(self._last_call))]
        return call_id <= last

    def _dispatch(self, kind: bytes, call_id: bytes, msg: Any, peer: Link | _Caller) -> None:
        handler = self._handlers.get(type(msg))
        if handler is None:
            self._dropped.labels("unexpected").inc()
            self._log.warning("unexpected message dropped", type=type(msg).__name__)
            if kind == CALL:
                self._reply(peer, call_id, ErrorReply(ErrorCode.MALFORMED, f"{type(msg).__name__} is not for me"))
            return
        if inspect.iscoroutinefunction(handler):
            if len(self._tasks) >= MAX_HANDLER_TASKS:
                self._dropped.labels("overflow").inc()
                if kind == CALL:
                    self._reply(peer, call_id, ErrorReply(ErrorCode.OVERLOADED, "too many calls at once"))
                return
            task = asyncio.create_task(self._answer(handler, kind, call_id, msg, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        try:
            answer = handler(msg, peer)
        except Exception as error:
            answer = self._failure(error, type(msg).__name__)
        if kind == CALL:
            self._reply(peer, call_id, answer)

    async def _answer(self, handler: Handler, kind: bytes, call_id: bytes, msg: Any, peer: Link | _Caller) -> None:
        try:
            answer = await handler(msg, peer)
        except Exception as error:
            answer = self._failure(error, type(msg).__name__)
        if kind == CALL:
            self._reply(peer, call_id, answer)

    def _failure(self, error: Exception, name: str) -> ErrorReply:
        if isinstance(error, DualPathError):
            self._log.warning("handler failed", type=name, error=str(error))
            return ErrorReply(error.code, error.message)
        self._log.error("handler failed", type=name, exc_info=error)
        return ErrorReply(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _reply(self, peer: Link | _Caller, call_id: bytes, answer: object) -> None:
        if not isinstance(peer, _Caller):
            return  # only a ROUTER answers calls
        if answer is None:
            answer = ErrorReply(ErrorCode.MALFORMED, "that message has no answer: it is not for calls")
        kind = ERROR if isinstance(answer, ErrorReply) else REPLY
        assert self._router is not None
        try:
            self.post(self._router, [peer.identity, kind, call_id], answer)
        except DualPathError as error:
            self._log.warning("answer not delivered", type=type(answer).__name__, error=str(error))

    async def silence(self) -> None:
        """Stop reading and end every handler; sending goes on."""
        tasks: list[Awaitable[Any]] = [*self._readers.values(), *self._tasks]
        for task in [*self._readers.values(), *self._tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.clear()

    async def close(self) -> None:
        """Stop reading, let queued messages go for LINGER_MS, close every socket."""
        await self.silence()
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._router is not None:
            self._router.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        await asyncio.to_thread(self._context.term)  # waits for what lingers, at most LINGER_MS


__all__ = ["ErrorReply", "Link", "Node", "Peer", "WireError"]
