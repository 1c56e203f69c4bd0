"""The life of a client request: admitted -> submitted -> tokens -> ended, over as many attempts as it takes.

An attempt that is lost is followed by another, whose prompt is the first prompt and every token received so far; token
indexes go on from there, so the client sees one output. Whatever ends a request early (the client leaves, a stop string
is complete, the deadline passes) cancels its attempt with the scheduler.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence, Set

from common.blocks.hashing import prefix_keys
from common.config import Config
from common.errors import RETRYABLE, DualPathError, ErrorCode
from common.finish import finish_reason
from common.log import get_logger
from common.messages import Cancel, Finished, PrefillStarted, RequestFailed, Submit, Token, Tokens
from common.metrics import Metrics
from common.model import Manifest
from common.rpc import Node, Peer
from common.types import TOKEN_BYTES, FinishReason, Request, Sampling, pack_tokens
from services.frontend.detokenize import OutputText
from services.frontend.progress import Progress
from services.frontend.updates import Timing, Update, Usage

#: Prompts of more tokens are hashed off the event loop.
HASH_INLINE_TOKENS = 16_384

Event = list[int] | FinishReason | DualPathError
"""Something that happened to an attempt: tokens that arrived together, its end, its failure."""


class Requests:
    """The client requests in hand: at most frontend.max_pending. Hands messages of engines to the request they are for.

    Messages of an older attempt, or of a request that has ended, are dropped and counted.
    """

    def __init__(self, config: Config, node: Node, metrics: Metrics, manifest: Manifest, eos_ids: Set[int]) -> None:
        self.config = config
        self.manifest = manifest
        self.eos_ids = eos_ids
        self.reply_to = node.endpoint
        self.scheduler = node.link(config.scheduler.control)
        self._draining = False
        self._in_hand: dict[str, ClientRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._gauge = metrics.gauge("requests_in_hand", "Client requests admitted and not ended")
        self._ended = metrics.counter("requests", "Client requests that ended, by outcome", ("outcome",))
        self._stale = metrics.counter("stale_messages", "Messages of attempts that have ended, by type", ("type",))
        self.retries = metrics.counter("retries", "Attempts after a lost one, by the reason of the loss", ("code",))
        node.on(Tokens, self._on_tokens)
        node.on(PrefillStarted, self._on_prefill_started)
        node.on(Finished, self._on_finished)
        node.on(RequestFailed, self._on_failed)

    def __len__(self) -> int:
        return len(self._in_hand)

    def admit(self, client_id: str = "") -> ClientRequest:
        """A place for a request; close() gives it back. DualPathError DRAINING or OVERLOADED.

        client_id: the client's own name for it. Ours starts with that and is unique, also where a client repeats its.
        """
        if self._draining:
            raise DualPathError(ErrorCode.DRAINING, "this front end is shutting down")
        limit = self.config.frontend.max_pending
        if len(self._in_hand) >= limit:
            raise DualPathError(ErrorCode.OVERLOADED, f"{limit} requests are in hand already; try again later")
        request = ClientRequest(self, f"{client_id or 'req'}-{secrets.token_hex(8)}")
        self._in_hand[request.request_id] = request
        self._idle.clear()
        self._gauge.set(len(self._in_hand))
        return request

    def leave(self, request: ClientRequest, outcome: str) -> None:
        """The request has ended; what still comes of it is stale. outcome: for the count, "" if it never started."""
        if self._in_hand.pop(request.request_id, None) is None:
            return
        if outcome:
            self._ended.labels(outcome).inc()
        self._gauge.set(len(self._in_hand))
        if not self._in_hand:
            self._idle.set()

    async def drain(self) -> None:
        """Admit nobody any more; returns once no request is in hand."""
        self._draining = True
        await self._idle.wait()

    def fail_all(self, error: DualPathError) -> None:
        """End every request in hand with this error, which must not be one that is retried."""
        for request in self._in_hand.values():
            request.failed(error)

    # -- messages of engines and the scheduler --

    def _find(self, request_id: str, attempt: int, message: type) -> ClientRequest | None:
        request = self._in_hand.get(request_id)
        if request is None or request.attempt != attempt:
            self._stale.labels(message.__name__).inc()
            return None
        return request

    def _on_tokens(self, msg: Tokens, peer: Peer) -> None:
        batches: dict[tuple[str, int], list[Token]] = {}
        for token in msg.tokens:
            batches.setdefault((token.request_id, token.attempt), []).append(token)
        for (request_id, attempt), batch in batches.items():
            if request := self._find(request_id, attempt, Tokens):
                request.arrived(batch)

    def _on_prefill_started(self, msg: PrefillStarted, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, PrefillStarted):
            request.prefill_started(msg)

    def _on_finished(self, msg: Finished, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, Finished):
            request.finished(msg)

    def _on_failed(self, msg: RequestFailed, peer: Peer) -> None:
        if request := self._find(msg.request_id, msg.attempt, RequestFailed):
            request.lost(msg)


class ClientRequest:
    """One request of a client. start(), then next_update() until it has a finish reason; close() in any case."""

    def __init__(self, requests: Requests, request_id: str) -> None:
        self.request_id = request_id
        self.attempt = -1
        self._requests = requests
        self._timeouts = requests.config.timeouts
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self._timeouts.request_s
        self._log = get_logger().bind(request=request_id)
        self._inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # bounded by max_tokens: duplicates stay out
        self._gap_timer: asyncio.TimerHandle | None = None
        self._running = False  # engines may be at work on this attempt
        self._lost = True  # the next thing to do is to submit an attempt
        self._num_failures = 0
        self._num_sent = 0
        self._started: PrefillStarted | None = None  # the first one counts
        self._submitted_at = 0.0  # by the loop's clock
        self._first_token_at: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._reason: FinishReason | None = None
        self._outcome = ""

    # -- for the client's side --

    def start(self, prompt: Sequence[int], sampling: Sampling, text: OutputText, hit_tokens: int | None = None) -> None:
        """What is asked for. Nothing is sent before the first next_update()."""
        self._prompt = pack_tokens(prompt)
        self._hit_tokens = hit_tokens
        self._sampling = sampling
        self._text = text
        self._progress = Progress(sampling.max_tokens)
        self._outcome = "cancelled"  # until it ends otherwise
        self._deadline_timer = self._loop.call_at(self._deadline, lambda: self.failed(self._too_late()))

    async def next_update(self) -> Update:
        """Waits for what comes next, through lost attempts. DualPathError if the request has failed for good."""
        while True:
            try:
                if self._lost:
                    await self._submit()
                update = self._advance(await self._next_event())
            except DualPathError as error:
                if not self._try_again(error):
                    self._outcome = error.code.value
                    self._log.warning("request failed", attempt=self.attempt, error=str(error))
                    raise
                continue
            if update.finish_reason is not None:
                self._outcome = update.finish_reason.value
                self._end_attempt()  # a stop string is complete while the engines go on
            return update

    @property
    def usage(self) -> Usage:
        cached = self._started.cached_tokens if self._started else 0
        return Usage(len(self._prompt) // TOKEN_BYTES, self._num_sent, cached, self._timing())

    def _timing(self) -> Timing | None:
        if self._started is None or self._first_token_at is None:
            return None
        before = (self._started.scheduling_s, self._started.allocation_s, self._started.read_s)
        return Timing(*before, max(self._first_token_at - self._submitted_at - sum(before), 0.0))

    def close(self) -> None:
        """The client needs no more: cancel what is running and forget the request."""
        self._end_attempt()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._requests.leave(self, self._outcome)

    # -- for the engines' side --

    def arrived(self, batch: list[Token]) -> None:
        """Tokens that arrived together."""
        tokens = [new for token in batch for new in self._progress.add(token.index, token.token)]
        if tokens:
            if self._first_token_at is None:
                self._first_token_at = self._loop.time()
            self._inbox.put_nowait((self.attempt, tokens))
        self._settle()

    def prefill_started(self, msg: PrefillStarted) -> None:
        if self._started is None:
            self._started = msg

    def finished(self, msg: Finished) -> None:
        """The engines are done; the last tokens may still be on their way, from the other engine."""
        self._reason = msg.reason
        self._progress.finish(msg.num_tokens)
        self._settle()

    def lost(self, msg: RequestFailed) -> None:
        """The scheduler has ended this attempt."""
        self._running = False
        self.failed(DualPathError(msg.code, msg.detail))

    def failed(self, error: DualPathError) -> None:
        self._inbox.put_nowait((self.attempt, error))

    def _settle(self) -> None:
        """After news of the running attempt: has it ended, or is something missing?"""
        if not self._running:
            return
        if self._progress.complete and self._reason is not None:
            self._running = False
            self._inbox.put_nowait((self.attempt, self._reason))
        elif self._progress.gap and self._gap_timer is None:
            # The first token comes from another engine than the rest, so it may be overtaken; but not by much.
            self._watch_gap()

    def _watch_gap(self) -> None:
        seen = (self.attempt, len(self._progress.tokens))
        self._gap_timer = self._loop.call_later(self._timeouts.call_s, self._gap_expired, seen)

    def _gap_expired(self, seen: tuple[int, int]) -> None:
        self._gap_timer = None
        if not self._running or not self._progress.gap:
            return
        if seen != (self.attempt, len(self._progress.tokens)):
            self._watch_gap()  # another gap than the one that was seen
            return
        detail = f"token {len(self._progress.tokens)} did not arrive within {self._timeouts.call_s:g} s"
        self.failed(DualPathError(ErrorCode.TRANSFER_FAILED, detail))

    # -- attempts --

    async def _submit(self) -> None:
        """Start the next attempt, unless the lost one has delivered everything already."""
        self._lost = False
        if (reason := self._ended_already()) is not None:
            self._inbox.put_nowait((self.attempt, reason))
            return
        if self._loop.time() >= self._deadline:
            raise self._too_late()
        self.attempt += 1
        if self.attempt == 0:
            self._submitted_at = self._loop.time()
        self._progress.restart()
        received = self._progress.tokens
        prompt = self._prompt + pack_tokens(received)
        request = Request(
            request_id=self.request_id,
            attempt=self.attempt,
            reply_to=self._requests.reply_to,
            prompt=prompt,
            keys=await self._block_keys(prompt),
            sampling=self._sampling,
            num_generated=len(received),
            hit_tokens=self._hit_tokens,
        )
        timeout = min(self._timeouts.call_s, self._deadline - self._loop.time())
        self._running = True
        try:
            await self._requests.scheduler.call(Submit(request), max(timeout, 0.0))
        except DualPathError as error:
            self._running = error.code is ErrorCode.UNREACHABLE  # it may have been accepted nevertheless
            raise

    def _ended_already(self) -> FinishReason | None:
        if self.attempt < 0 or not (tokens := self._progress.tokens):
            return None
        return finish_reason(tokens[-1], len(tokens), self._sampling, self._requests.eos_ids)

    async def _block_keys(self, prompt: bytes) -> bytes:
        manifest = self._requests.manifest
        arguments = (manifest.namespace, prompt, manifest.geometry.block_size)
        if len(prompt) <= HASH_INLINE_TOKENS * TOKEN_BYTES:
            return prefix_keys(*arguments)
        return await asyncio.to_thread(prefix_keys, *arguments)

    def _try_again(self, error: DualPathError) -> bool:
        """End the attempt that failed; is another one to follow?"""
        self._end_attempt()
        if error.code is not ErrorCode.PREEMPTED:
            self._num_failures += 1
        if error.code not in RETRYABLE or self._num_failures >= self._requests.config.frontend.max_attempts:
            return False
        self._requests.retries.labels(error.code.value).inc()
        self._log.info("attempt lost", attempt=self.attempt, received=len(self._progress.tokens), error=str(error))
        self._lost = True
        return True

    def _end_attempt(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        if not self._running:
            return
        self._running = False
        try:
            self._requests.scheduler.send(Cancel(self.request_id, self.attempt))
        except DualPathError as error:
            self._log.warning("cancellation not sent", attempt=self.attempt, error=str(error))

    # -- events --

    async def _next_event(self) -> Event:
        while True:
            attempt, event = await self._inbox.get()
            if attempt == self.attempt or isinstance(event, list):  # tokens in order count, whatever their attempt
                return event

    def _too_late(self) -> DualPathError:
        return DualPathError(ErrorCode.DEADLINE, f"the request did not end within {self._timeouts.request_s:g} s")

    def _advance(self, event: Event) -> Update:
        if isinstance(event, DualPathError):
            raise event
        if isinstance(event, FinishReason):
            text = self._text.finish()
            return Update([], text, FinishReason.STOP if self._text.stopped else event)
        shown: list[int] = []
        text = ""
        for token in event:
            shown.append(token)
            self._num_sent += 1
            if self._ends(token):
                continue
            text += self._text.push(token)
            if self._text.stopped:
                return Update(shown, text, FinishReason.STOP)
        return Update(shown, text, None)

    def _ends(self, token: int) -> bool:
        """True for the end-of-sequence or stop token itself, which is no text."""
        reason = finish_reason(token, self._num_sent, self._sampling, self._requests.eos_ids)
        return reason is FinishReason.STOP
