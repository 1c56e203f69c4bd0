"""The life of one sequence that a client asked for: submitted -> tokens -> ended, over as many attempts as it takes.

An attempt that is lost is followed by another, whose prompt is the first prompt and every token received so far; token
indexes go on from there, so the client sees one output: each token once, with its log probability, and stop strings
matched across the seam. Whatever ends it early (the client leaves, a stop string is complete, the deadline passes)
cancels its attempt with the scheduler.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import Counter

from common.blocks.hashing import prefix_keys, salted
from common.config import Config
from common.errors import PLANNED, RETRYABLE, DualPathError, ErrorCode
from common.finish import finish_reason, stop_ids
from common.log import get_logger
from common.messages import Cancel, Finished, PrefillStarted, RequestFailed, Submit, Token
from common.model import Manifest
from common.rpc import Link
from common.types import TOKEN_BYTES, FinishReason, Request, Sampling, pack_tokens
from services.frontend.admission import Admission
from services.frontend.detokenize import OutputText
from services.frontend.inbox import Event, Inbox
from services.frontend.progress import Progress
from services.frontend.turns import Turns
from services.frontend.updates import Sink, Timing, Update, Usage

#: Prompts of more tokens are hashed off the event loop.
HASH_INLINE_TOKENS = 16_384
#: A scheduler that shuts down, or does not know us yet, says so at once: it is asked again after so many seconds.
REFUSALS = frozenset({ErrorCode.STRANGER, ErrorCode.DRAINING})
REFUSED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """One sequence to generate. prompt: packed token ids. text: of this sequence only. hit_tokens, salt: as in
    common.types.Request."""

    prompt: bytes
    sampling: Sampling
    text: OutputText
    hit_tokens: int | None = None
    salt: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt) // TOKEN_BYTES


class Home(Protocol):
    """What a request needs of the front end. reply_to: where engines send its tokens. enrolled(): returns while a
    scheduler has this front end, or once the next one does."""

    config: Config
    manifest: Manifest
    eos_ids: Set[int]
    reply_to: str
    scheduler: Link
    retries: Counter
    admission: Admission
    turns: Turns
    enrolled: Callable[[], Awaitable[None]]

    def leave(self, request: ClientRequest, outcome: str) -> None:
        """The request has ended; what still comes of it is stale."""


class ClientRequest:
    """next_update() until it has a finish reason; close() in any case. Nothing is sent before the first update is asked
    for. Its prompt is queued until its first token comes: DualPathError OVERLOADED if too much is."""

    def __init__(self, home: Home, request_id: str, asked: Asked) -> None:
        home.admission.queue(asked.num_tokens)
        self._queued = True
        self.request_id = request_id
        self.attempt = -1
        self._home = home
        self._asked = asked
        self._sampling = asked.sampling
        self._stop_ids = stop_ids(asked.sampling, home.eos_ids)
        self._text = asked.text
        self._timeouts = home.config.timeouts
        self._loop = asyncio.get_running_loop()
        self._log = get_logger().bind(request=request_id)
        self._inbox = Inbox(home.turns)
        self._progress: Progress[Token] = Progress(asked.sampling.max_tokens)
        # numbers, not objects: the garbage collector looks at every object that there is, all at once
        self._received = array("I")
        self._gap_timer: asyncio.TimerHandle | None = None
        self._running = False  # engines may be at work on this attempt
        self._lost = True  # the next thing to do is to submit an attempt
        self._submitting: asyncio.Timeout | None = None  # that is under way
        self._given_up: DualPathError | None = None
        self._num_failures = 0
        self._pause_s = 0.0  # before the next attempt
        self._num_sent = 0
        self._started: PrefillStarted | None = None  # the first one counts
        self.submitted_at = 0.0  # by the loop's clock, which is the monotonic one
        self.token_times: list[float] = []  # of the first, the second and the last token so far, at most
        self._reason: FinishReason | None = None
        self._outcome = "cancelled"  # until it ends otherwise
        self._deadline_timer = self._loop.call_later(self._timeouts.request_s, lambda: self.give_up(self._too_late()))

    # -- for the client's side --

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

    def straight(self, sink: Sink) -> None:
        """From here on updates go to sink while it is free, without waking who waits for the next one. Those that it
        cannot take, and the last one, still come from next_update()."""
        self._inbox.straight = partial(self._tell, sink)

    def _tell(self, sink: Sink, tokens: list[Token]) -> Event | None:
        try:
            if not sink.free():
                return tokens
            update = self._advance(tokens)
            if update.finish_reason is not None:
                return update
            sink.take(update)
        except Exception as error:  # whoever waits is to learn of it
            return error
        return None

    @property
    def usage(self) -> Usage:
        cached = self._started.cached_tokens if self._started else 0
        return Usage(self._asked.num_tokens, self._num_sent, cached, self._timing())

    def _timing(self) -> Timing | None:
        if self._started is None or not self.token_times:
            return None
        before = (self._started.scheduling_s, self._started.allocation_s, self._started.read_s)
        return Timing(*before, max(self.token_times[0] - self.submitted_at - sum(before), 0.0))

    def close(self) -> None:
        """The client needs no more: cancel what is running and forget the request."""
        self._inbox.straight = None  # it leads back here: together they would wait for a collection
        self._end_attempt()
        self._unqueue()
        self._deadline_timer.cancel()
        self._home.leave(self, self._outcome)

    def _unqueue(self) -> None:
        if self._queued:
            self._queued = False
            self._home.admission.unqueue(self._asked.num_tokens)

    # -- for the engines' side --

    def arrived(self, token: Token) -> None:
        tokens = self._progress.add(token.index, token)
        if tokens:
            self._unqueue()
            for new in tokens:
                self._received.append(new.token)
                self._note_time()
            self._inbox.put(self.attempt, tokens)
        self._settle()

    def _note_time(self) -> None:
        """Of the token that came last."""
        now, times = self._loop.time(), self.token_times
        if len(times) == 3:
            times[2] = now
        else:
            times += [now, now] if times else [now]

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
        self._over(DualPathError(msg.code, msg.detail))

    def moved(self, reason: str) -> None:
        """Nobody knows of this attempt any more: it goes on in a new one."""
        self._over(DualPathError(ErrorCode.MOVED, reason))

    def _over(self, error: DualPathError) -> None:
        self._running = False
        self.failed(error)

    def failed(self, error: DualPathError) -> None:
        self._inbox.put(self.attempt, error)

    def give_up(self, error: DualPathError) -> None:
        """It ends with this error, which must not be one that is retried, whatever it waits for: also between two
        attempts, where nobody looks into the inbox."""
        self._given_up = error
        if self._submitting is not None and not self._submitting.expired():
            self._submitting.reschedule(self._loop.time())
        self.failed(self._last_word(error))

    def _settle(self) -> None:
        """After news of the running attempt: has it ended, or is something missing?"""
        if not self._running:
            return
        if self._reason is not None and self._progress.complete:
            self._running = False
            self._inbox.put(self.attempt, self._reason)
        elif self._gap_timer is None:
            self._watch_gap()

    def _watch_gap(self) -> None:
        if (missing := self._missing()) is not None:
            what, patience = missing
            seen = (self.attempt, len(self._received), what)
            self._gap_timer = self._loop.call_later(patience, self._gap_expired, seen)

    def _missing(self) -> tuple[str, float] | None:
        """What is late, though not for long as yet, and how long it may be; None: nothing is."""
        tokens, timeouts = self._received, self._timeouts
        if self._progress.gap:
            # the first token comes from another engine than the rest, so it may be overtaken; but not by much
            return f"token {len(tokens)}", timeouts.call_s
        last = len(tokens) >= self._sampling.max_tokens or (len(tokens) > 0 and tokens[-1] in self._stop_ids)
        if last and self._ended_already() is not None:
            # the engine announces its blocks first
            return f"the end after token {len(tokens) - 1}", timeouts.store_s + 2 * timeouts.call_s
        return None

    def _gap_expired(self, seen: tuple[int, int, str]) -> None:
        self._gap_timer = None
        missing = self._missing() if self._running else None
        if missing is None:
            return
        what, patience = missing
        if seen != (self.attempt, len(self._received), what):
            self._watch_gap()  # another gap than the one that was seen
            return
        self.failed(DualPathError(ErrorCode.TRANSFER_FAILED, f"{what} did not arrive within {patience:g} s"))

    # -- attempts --

    async def _submit(self) -> None:
        """Start the next attempt, unless the lost one has delivered everything already."""
        self._lost = False
        if self._end_if_complete():
            return
        self._check_given_up()
        try:
            async with asyncio.timeout(None) as self._submitting:
                await asyncio.sleep(self._pause_s)
                await self._home.enrolled()
                if not self._end_if_complete():  # without a scheduler engines go on: the rest may have come meanwhile
                    await self._start_attempt()
        except TimeoutError:
            self._check_given_up()
        finally:
            self._submitting = None

    def _check_given_up(self) -> None:
        if self._given_up is not None:
            raise self._last_word(self._given_up) from None

    @staticmethod
    def _last_word(error: DualPathError) -> DualPathError:
        """To be raised: with a traceback, the one that is kept here would keep the prompt."""
        return DualPathError(error.code, error.message)

    async def _start_attempt(self) -> None:
        self.attempt += 1
        if self.attempt == 0:
            self.submitted_at = self._loop.time()
        self._progress.restart()
        prompt = self._asked.prompt + pack_tokens(self._received)
        request = Request(
            request_id=self.request_id,
            attempt=self.attempt,
            reply_to=self._home.reply_to,
            prompt=prompt,
            keys=await self._block_keys(prompt),
            sampling=self._sampling,
            num_generated=len(self._received),
            hit_tokens=self._asked.hit_tokens,
            salt=self._asked.salt,
        )
        self._running = True
        try:
            await self._home.scheduler.call(Submit(request), self._timeouts.call_s)
        except DualPathError as error:
            self._running = error.code is ErrorCode.UNREACHABLE  # it may have been accepted nevertheless
            raise

    def _end_if_complete(self) -> bool:
        """All tokens are there, though nobody has said that it is the end."""
        reason = self._ended_already()
        if reason is not None:
            self._inbox.put(self.attempt, reason)
        return reason is not None

    def _ended_already(self) -> FinishReason | None:
        if self.attempt < 0 or not self._received:
            return None
        return finish_reason(self._received[-1], len(self._received), self._sampling, self._home.eos_ids)

    async def _block_keys(self, prompt: bytes) -> bytes:
        manifest = self._home.manifest
        arguments = (salted(manifest.namespace, self._asked.salt), prompt, manifest.geometry.block_size)
        if len(prompt) <= HASH_INLINE_TOKENS * TOKEN_BYTES:
            return prefix_keys(*arguments)
        return await asyncio.to_thread(prefix_keys, *arguments)

    def _try_again(self, error: DualPathError) -> bool:
        """End the attempt that failed; is another one to follow?"""
        self._end_attempt()
        if error.code not in PLANNED:
            self._num_failures += 1
        if error.code not in RETRYABLE or self._num_failures >= self._home.config.frontend.max_attempts:
            return False
        self._pause_s = REFUSED_PAUSE_S if error.code in REFUSALS else 0.0
        self._home.retries.labels(error.code.value).inc()
        self._log.info("attempt lost", attempt=self.attempt, received=len(self._received), error=str(error))
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
            self._home.scheduler.send(Cancel(self.request_id, self.attempt))
        except DualPathError as error:
            self._log.warning("cancellation not sent", attempt=self.attempt, error=str(error))

    # -- events --

    async def _next_event(self) -> Event:
        while True:
            attempt, event = await self._inbox.next()
            if attempt == self.attempt or isinstance(event, list):  # tokens in order count, whatever their attempt
                return event

    def _too_late(self) -> DualPathError:
        return DualPathError(ErrorCode.DEADLINE, f"the request did not end within {self._timeouts.request_s:g} s")

    def _advance(self, event: Event) -> Update:
        if isinstance(event, Update):
            return event
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                del event  # its traceback and this frame would keep each other, and the prompt
        if isinstance(event, FinishReason):
            text = self._text.finish()
            return Update([], text, FinishReason.STOP if self._text.stopped else event)
        text = ""
        for position, token in enumerate(event, 1):
            self._num_sent += 1
            if token.token in self._stop_ids and self._ends(token.token):
                continue
            text += self._text.push(token.token)
            if self._text.stopped:
                return Update(event[:position], text, FinishReason.STOP)
        return Update(event, text, None)

    def _ends(self, token: int) -> bool:
        """True for the end-of-sequence or stop token itself, which is no text."""
        return finish_reason(token, self._num_sent, self._sampling, self._home.eos_ids) is FinishReason.STOP
