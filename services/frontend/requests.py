"""The client requests in hand: admitted within bounds, known to the engines by their ids, let go at their end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence, Set

from common.config import Config
from common.errors import DualPathError
from common.messages import Finished, PrefillStarted, RequestFailed, Tokens
from common.metrics import Metrics
from common.model import Manifest
from common.rpc import Node, Peer
from common.tracing import ROOT, Tracer
from common.types import FinishReason
from services.frontend.admission import Admission
from services.frontend.client_request import Asked, ClientRequest
from services.frontend.generation import Generation
from services.frontend.latencies import Latencies
from services.frontend.tenants import EVERYBODY, Tenant
from services.frontend.turns import Turns

SUCCESS = frozenset(reason.value for reason in FinishReason)


class Requests:
    """All of them. Hands messages of engines to the request they are for. enrolled: of client_request.Home.

    Messages of an older attempt, or of a request that has ended, are dropped and counted.
    """

    def __init__(
        self,
        config: Config,
        node: Node,
        metrics: Metrics,
        manifest: Manifest,
        eos_ids: Set[int],
        enrolled: Callable[[], Awaitable[None]],
        tracer: Tracer,
    ) -> None:
        self.config = config
        self.manifest = manifest
        self.eos_ids = eos_ids
        self.enrolled = enrolled
        self._tracer = tracer
        self.reply_to = node.endpoint
        self.scheduler = node.link(config.scheduler.control)
        self.retries = metrics.counter("retries", "Attempts after a lost one, by the reason of the loss", ("code",))
        self.admission = Admission(config.frontend.max_pending, config.frontend.max_queued_tokens)
        self.turns = Turns()
        self._running: dict[str, ClientRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        gauge = metrics.gauge
        gauge("requests_in_hand", "Client requests admitted and not ended").set_function(lambda: len(self))
        gauge("queued_tokens", "Prompt tokens of requests whose first token has not come").set_function(
            lambda: self.admission.queued_tokens
        )
        self._latencies = Latencies(metrics)
        self._ended = metrics.counter("requests", "Client requests that ended, by outcome", ("outcome",))
        self._refused = metrics.counter("requests_refused", "Client calls that found no place, by reason", ("reason",))
        self._stale = metrics.counter("stale_messages", "Messages of attempts that have ended, by type", ("type",))
        node.on(Tokens, self._on_tokens)
        node.on(PrefillStarted, self._on_prefill_started)
        node.on(Finished, self._on_finished)
        node.on(RequestFailed, self._on_failed)

    def __len__(self) -> int:
        return self.admission.in_hand

    def admit(self, client_id: str = "", tenant: Tenant = EVERYBODY) -> Call:
        """A place for a call; close() gives it back. DualPathError OVERLOADED, ApiError 429.

        client_id: the client's own name for it. Ours starts with that and is unique, also where a client repeats its.
        """
        self.take(tenant, 1)
        return Call(self, f"{client_id or 'req'}-{secrets.token_hex(8)}", tenant)

    async def ended(self) -> None:
        """Returns once no request is in hand."""
        await self._idle.wait()

    def fail_all(self, error: DualPathError) -> None:
        """End every request in hand with this error, which must not be one that is retried."""
        for request in self._running.values():
            request.give_up(error)

    def restart_all(self) -> None:
        """The scheduler has gone, and what it knew of requests with it: each goes on in a new attempt."""
        for request in self._running.values():
            request.moved("the scheduler has gone")

    # -- for calls and their requests --

    def take(self, tenant: Tenant, count: int) -> None:
        try:
            self.admission.take(tenant, count)
        except Exception as error:
            self._refused.labels("overloaded" if isinstance(error, DualPathError) else "rate_limit").inc()
            raise
        self._idle.clear()

    def give_back(self, tenant: Tenant, count: int) -> None:
        self.admission.give_back(tenant, count)
        if not self.admission.in_hand:
            self._idle.set()

    def open(self, request_id: str, asked: Asked) -> ClientRequest:
        """It is known to engines from now on."""
        request = self._running[request_id] = ClientRequest(self, request_id, asked)
        return request

    def leave(self, request: ClientRequest, outcome: str) -> None:
        """The request has ended; what still comes of it is stale."""
        if self._running.pop(request.request_id, None) is None:
            return
        self._ended.labels(outcome).inc()
        if outcome in SUCCESS:
            self._latencies.ended(request)
        if request.attempt >= 0:
            usage = request.usage
            self._tracer.span(
                ROOT,
                request.request_id,
                request.submitted_at,
                outcome=outcome,
                attempts=request.attempt + 1,
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                completion_tokens=usage.completion,
            )

    # -- messages of engines and the scheduler --

    def _find(self, request_id: str, attempt: int, message: type) -> ClientRequest | None:
        request = self._running.get(request_id)
        if request is None or request.attempt != attempt:
            self._stale.labels(message.__name__).inc()
            return None
        return request

    def _on_tokens(self, msg: Tokens, peer: Peer) -> None:
        stale = False
        for token in msg.tokens:
            request = self._running.get(token.request_id)
            if request is not None and request.attempt == token.attempt:
                request.arrived(token)
            else:
                stale = True
        if stale:
            self._stale.labels(Tokens.__name__).inc()

    def _on_prefill_started(self, msg: PrefillStarted, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, PrefillStarted):
            request.prefill_started(msg)

    def _on_finished(self, msg: Finished, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, Finished):
            request.finished(msg)

    def _on_failed(self, msg: RequestFailed, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, RequestFailed):
            request.lost(msg)


class Call:
    """One HTTP request of a client: a place from its admission on, and one for each further sequence that it asks for.
    close() in any case."""

    def __init__(self, requests: Requests, request_id: str, tenant: Tenant) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self._requests = requests
        self._places = 1
        self._started: list[ClientRequest] = []
        self._generation: Generation | None = None

    def start(self, asked: Sequence[Asked], n: int) -> Generation:
        """All that is asked for, n sequences a prompt; nothing is sent before their first updates are waited for.
        Raises as admit() does."""
        further = len(asked) - self._places
        self._requests.take(self.tenant, further)
        self._places += further
        for number, one in enumerate(asked):
            name = f"{self.request_id}-{number}" if number else self.request_id
            self._started.append(self._requests.open(name, one))
        self._generation = Generation(self._started, n)
        return self._generation

    def close(self) -> None:
        """The client needs no more: cancel what is running and forget it."""
        if self._generation is not None:
            self._generation.close()
        for request in self._started:
            request.close()
        self._requests.give_back(self.tenant, self._places)
        self._places = 0
