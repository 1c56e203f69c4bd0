"""The decode engine (paper §3, §4.1): takes over prefilled requests and decodes them in continuous batches.

A request's KV is staged in the DE buffer. Once it is complete and the first token is known, pages are allocated, the
traffic manager copies the blocks host to device and frees the buffer, and the request joins the running batch. Each
block that fills is persisted at once. If pages run out the youngest running request is preempted: it fails with
PREEMPTED, and its next attempt finds what it had in storage.
"""

from __future__ import annotations

import asyncio

from common.blocks.pool import SlotPool
from common.clock import monotonic
from common.config import DecodeConfig
from common.errors import DualPathError, ErrorCode
from common.finish import finish_reason
from common.messages import (
    Assign,
    Capacity,
    Delivered,
    Finished,
    FirstToken,
    HandedOver,
    LoadPages,
    PagesPersisted,
    PersistPages,
    RequestDone,
    Token,
    Tokens,
)
from common.rpc import Peer
from common.types import Request, RequestKey, Role, Sampled
from services.decode.pages import PagePool
from services.decode.sequence import Sequence
from services.engine.service import LAYER_TRANSFERS, EngineService


class DecodeEngine(EngineService[Sequence]):
    """One device."""

    role = Role.DECODE

    @property
    def settings(self) -> DecodeConfig:
        return self.config.decode

    def capacity(self, buffer_blocks: int) -> Capacity:
        size = self.geometry.block_size
        pages = self.memory.num_pages
        limit = min(self.model.max_context_tokens, pages * size, buffer_blocks * size)
        return Capacity(limit, buffer_blocks, pages * size)

    async def open(self) -> None:
        await super().open()
        self.pages = PagePool(SlotPool(self.memory.num_pages))
        self._handoff: asyncio.Queue[Sequence] = asyncio.Queue()
        self._running: list[Sequence] = []
        self._tickets: dict[int, list[int]] = {}
        self._announcements: dict[RequestKey, list[asyncio.Task[None]]] = {}  # of running requests
        self._next_ticket = 0
        self._wake = asyncio.Event()  # pages came free, or the running batch changed
        self._decoded = self.metrics.counter("decode_tokens", "Tokens decoded")
        self._preempted = self.metrics.counter("preemptions", "Running requests preempted for lack of pages")
        self.metrics.gauge("pages", "Pages of device memory").set(self.pages.pool.total)
        self.metrics.gauge("pages_free", "Free pages of device memory").set_function(lambda: self.pages.num_free)
        running = self.metrics.gauge("decode_running_requests", "Requests in the running batch")
        running.set_function(lambda: len(self._running))
        on = self.node.on
        on(FirstToken, self._on_first_token)
        on(Delivered, self._on_delivered)
        on(PagesPersisted, self._on_persisted)
        self.spawn(self._take_over(), "take over", essential=True)
        self.spawn(self._decode(), "decode", essential=True)

    def load(self) -> tuple[int, int, int]:
        tokens = sum(len(sequence.tokens) for sequence in self._sequences.values())
        return len(self._sequences), tokens, self.pages.num_free * self.geometry.block_size

    # -- requests in --

    def assigned(self, msg: Assign) -> None:
        sequence = Sequence(msg, monotonic() + self.config.timeouts.request_s)
        self._sequences[sequence.key] = sequence
        blocks = self.geometry.blocks_for(sequence.request.num_tokens)
        self.stage(msg, blocks, slice(msg.pe_blocks, None), msg.prefill)

    def _on_first_token(self, msg: FirstToken, peer: Peer) -> None:
        sequence = self._sequences.get((msg.request_id, msg.attempt))
        if sequence is not None and not sequence.has_first_token:
            sequence.has_first_token = True
            sequence.tokens.append(msg.token)
            sequence.cached_tokens, sequence.finish = msg.cached_tokens, msg.finish
            self._hand_over_if_ready(sequence)

    def _on_delivered(self, msg: Delivered, peer: Peer) -> None:
        sequence = self._sequences.get((msg.request_id, msg.attempt))
        if sequence is not None and not sequence.delivered:
            sequence.delivered = True
            self._hand_over_if_ready(sequence)

    def _hand_over_if_ready(self, sequence: Sequence) -> None:
        timeouts = self.config.timeouts
        if sequence.ready:
            sequence.since = monotonic()
            sequence.due = sequence.since + timeouts.request_s
            self._handoff.put_nowait(sequence)
        else:  # the other of the two follows when the forward is drained: within the prefill engine's own patience
            sequence.due = monotonic() + LAYER_TRANSFERS * timeouts.transfer_s + timeouts.call_s

    def drop(self, key: RequestKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        self._announcements.pop(key, None)
        sequence.dropped = True  # whoever holds its pages (a handoff, the step in hand) gives them back
        if not sequence.pages:
            self.release(key)
        self._wake.set()
        self.fetch()

    # -- handoff --

    async def _take_over(self) -> None:
        """One after the other: device memory is granted in the order in which requests became ready."""
        while True:
            sequence = await self._handoff.get()
            while not sequence.dropped and not self._allocate(sequence):
                self._wake.clear()
                await self._wake.wait()
            if not sequence.dropped:
                self.spawn(self._load(sequence), f"load {sequence.key[0]}", essential=True)

    def _allocate(self, sequence: Sequence) -> bool:
        """Pages for the prompt; a request that has ended with its first token needs none."""
        if sequence.finish is not None:
            return True
        admitted = sum(bool(other.pages) for other in self._sequences.values())
        if admitted >= self.config.decode.max_running:
            return False
        pages = self.pages.take(self.geometry.blocks_for(sequence.request.num_tokens))
        sequence.pages = pages or []
        return pages is not None

    async def _load(self, sequence: Sequence) -> None:
        request = sequence.request
        cached_blocks = sequence.cached_tokens // self.geometry.block_size
        timeouts = self.config.timeouts
        msg = LoadPages(*sequence.key, sequence.pages, request.keys, cached_blocks)
        call = asyncio.ensure_future(self.traffic_manager.call(msg, timeout=None))
        await asyncio.wait({call}, timeout=timeouts.transfer_s + timeouts.call_s)
        if not call.done():
            self._handoff_failed(sequence, ErrorCode.UNREACHABLE, "the traffic manager does not answer")
            await asyncio.wait({call})  # until it is answered the pages may be written
        try:
            await call
            await self.backend.pull_pages(sequence.pages)
        except DualPathError as error:
            self._handoff_failed(sequence, error.code, error.message)
        if sequence.dropped:
            self._free(sequence)
            return
        self.to_scheduler(HandedOver(*sequence.key))
        self.tracer.span("handoff", request.request_id, sequence.since, pages=len(sequence.pages))
        sequence.since = monotonic()
        self.fetch()  # device memory that is taken now, and no longer only assigned
        if sequence.finish is not None:
            self._finished(sequence)
            return
        self._running.append(sequence)
        self._wake.set()

    def _handoff_failed(self, sequence: Sequence, code: ErrorCode, detail: str) -> None:
        if not sequence.dropped:
            self.request_failed(sequence.key, code, f"handoff: {detail}")
            self.drop(sequence.key)
        self.release(sequence.key)  # the buffer, if the load never began

    # -- decoding --

    async def _decode(self) -> None:
        while True:
            self._sweep()
            batch = self._grow()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            for sequence in batch:
                await self.faults.point("compute", request=sequence.key[0])
            self.memory.note_use((self.pages.pool.total - self.pages.num_free) * self.geometry.full_block_bytes)
            tokens = await self.backend.decode(batch)
            self._decoded.inc(len(tokens))
            self._advance(batch, tokens)

    def _sweep(self) -> None:
        """Between steps nobody reads pages: those of dropped requests go back."""
        for sequence in self._running:
            if sequence.dropped:
                self._free(sequence)
        self._running = [sequence for sequence in self._running if not sequence.dropped]

    def _grow(self) -> list[Sequence]:
        """The next batch: every running sequence that has a page for its next token.

        When pages run out, a sequence waits for those that are still being copied out; if there are none, the youngest
        is preempted.
        """
        for sequence in list(self._running):
            while not sequence.dropped and sequence.needs_page(self.geometry.block_size):
                page = self.pages.take(1)
                if page is not None:
                    sequence.pages += page
                elif self.pages.num_leaving:
                    break
                else:
                    self._preempt()
        return [
            sequence
            for sequence in self._running
            if not sequence.dropped and not sequence.needs_page(self.geometry.block_size)
        ]

    def _preempt(self) -> None:
        victim = next(sequence for sequence in reversed(self._running) if not sequence.dropped)
        self._preempted.inc()
        self.request_failed(victim.key, ErrorCode.PREEMPTED, "device memory is exhausted")
        self.drop(victim.key)
        self._free(victim)

    def _free(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        self._wake.set()

    def _advance(self, batch: list[Sequence], tokens: list[Sampled]) -> None:
        """Tokens out, filled blocks to storage, finished requests away."""
        out: dict[str, tuple[Request, list[Token]]] = {}
        full: dict[Sequence, tuple[int, bytes]] = {}
        ended = []
        for sequence, sampled in zip(batch, tokens, strict=True):
            if sequence.dropped:
                continue
            filled = sequence.computed_one(self.geometry, self.model.manifest.namespace)
            if filled is not None:
                full[sequence] = filled
            sequence.tokens.append(sampled.token)
            request = sequence.request
            out.setdefault(request.reply_to, (request, []))[1].append(
                Token(*sequence.key, sequence.num_generated - 1, sampled.token, sampled.logprobs)
            )
            sequence.finish = finish_reason(
                sampled.token, sequence.num_generated, request.sampling, self.backend.eos_token_ids
            )
            if sequence.finish is not None:
                ended.append(sequence)
        for request, generated in out.values():
            self.to_frontend(request, Tokens(generated))
        self._running = [sequence for sequence in self._running if sequence.finish is None]
        if full:
            self._announce(full)
        for sequence in ended:
            self.spawn(self._end(sequence), f"end {sequence.key[0]}", essential=True)

    # -- persistence and end --

    def _announce(self, full: dict[Sequence, tuple[int, bytes]]) -> None:
        """Filled blocks on their way to storage: page and key, by sequence. Pinned until they have been copied out."""
        self._next_ticket += 1
        pages, keys = [page for page, _ in full.values()], [key for _, key in full.values()]
        self._tickets[self._next_ticket] = pages
        for page in pages:
            self.pages.pin(page)
        persist = self._persist(self._next_ticket, pages, keys)
        announcement = self.spawn(persist, f"persist {self._next_ticket}", essential=True)
        for sequence in full:
            self._announcements.setdefault(sequence.key, []).append(announcement)

    async def _persist(self, ticket: int, pages: list[int], keys: list[bytes]) -> None:
        """Returns when the blocks are announced, or given up."""
        timeouts = self.config.timeouts
        try:
            await self.backend.push_pages(pages)
            call = PersistPages(ticket, pages, b"".join(keys))
            await self.traffic_manager.call(call, timeouts.call_s + timeouts.store_s)
        except DualPathError as error:
            self.log.warning("generated blocks not persisted", blocks=len(pages), error=str(error))
            if error.code is not ErrorCode.UNREACHABLE:
                self._unpin(ticket)  # refused: nobody reads the pages; unanswered, they stay pinned

    async def _end(self, sequence: Sequence) -> None:
        """A request ends once all of its blocks are announced, whenever they filled: its next turn must find them."""
        announcements = self._announcements.pop(sequence.key, [])
        if announcements:
            await asyncio.wait(announcements)
        self._finished(sequence)

    def _on_persisted(self, msg: PagesPersisted, peer: Peer) -> None:
        self._unpin(msg.ticket)

    def _unpin(self, ticket: int) -> None:
        for page in self._tickets.pop(ticket, []):
            self.pages.unpin(page)
        self._wake.set()

    def _finished(self, sequence: Sequence) -> None:
        """The last word on a request: nothing of it remains here but pages that are still being copied out."""
        self._free(sequence)
        if self._sequences.pop(sequence.key, None) is None:
            return  # cancelled meanwhile
        assert sequence.finish is not None
        self.tracer.span("decode", sequence.key[0], sequence.since, tokens=sequence.num_generated)
        self.to_frontend(sequence.request, Finished(*sequence.key, sequence.finish, sequence.num_generated))
        self.to_scheduler(RequestDone(*sequence.key))
        self.fetch()

    # -- end --

    def check_integrity(self) -> None:
        """AssertionError if a page is lost."""
        self.pages.check_integrity()

    async def drain(self) -> None:
        while self._sequences or self._tickets:
            await asyncio.sleep(0.02)
