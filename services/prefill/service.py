"""The prefill engine (paper §3): chunked prefill, layerwise or resident; samples each request's first token and streams
it.

The life of a request is in sequence.py, that of a forward in forwards.py.
"""

from __future__ import annotations

import asyncio

from common.clock import monotonic
from common.config import PrefillConfig
from common.errors import ConfigError, DualPathError, ErrorCode
from common.finish import finish_reason
from common.messages import (
    Assign,
    Capacity,
    FirstToken,
    ForwardDrained,
    LayersLoaded,
    Member,
    PrefillDone,
    Ready,
    Token,
    Tokens,
)
from common.rpc import Peer
from common.types import ReadPath, RequestKey, Role, Sampled
from services.engine.lockstep import Lockstep
from services.engine.profiled import ProfiledBackend
from services.engine.service import LAYER_TRANSFERS, EngineService
from services.prefill.batching import Budget, Chunk, Quota, pack
from services.prefill.forwards import Forwards, Run
from services.prefill.layerwise import Layerwise, layerwise_rows
from services.prefill.resident import Resident, resident_rows
from services.prefill.sequence import Sequence


class PrefillEngine(EngineService[Sequence]):
    """One device. Requests whose reads are done are served strictly FIFO."""

    role = Role.PREFILL
    forwards: Forwards
    _lockstep: Lockstep | None = None

    @property
    def settings(self) -> PrefillConfig:
        return self.config.prefill

    @property
    def wait_s(self) -> float:
        return LAYER_TRANSFERS * self.config.timeouts.transfer_s

    def capacity(self, buffer_blocks: int) -> Capacity:
        rows = layerwise_rows(self) if self.settings.layerwise else resident_rows(self)
        limit = min(self.model.max_context_tokens, rows, buffer_blocks * self.geometry.block_size)
        return Capacity(limit, buffer_blocks, rows)

    async def open(self) -> None:
        await super().open()
        self._wake = asyncio.Event()
        self._quota = self._make_quota()
        self.forwards = Layerwise(self) if self.settings.layerwise else Resident(self)
        self._computed_tokens = self.metrics.counter("prefill_tokens", "Prompt tokens computed")
        self._attention = self.metrics.counter("attention_seconds", "Predicted attention of the forwards computed")
        self._cached_tokens = self.metrics.counter("cached_tokens", "Prompt tokens found in storage")
        on = self.node.on
        on(Ready, self._on_ready)
        on(LayersLoaded, lambda msg, peer: self.forwards.loaded(msg))
        on(ForwardDrained, lambda msg, peer: self.forwards.drained(msg))
        self.spawn(self._serve(), "serve", essential=True)

    async def start(self) -> None:
        await super().start()
        if isinstance(self.backend, ProfiledBackend):
            self._lockstep = Lockstep(
                self.node,
                self.me,
                self.members,
                lambda: self.fetching.leader,
                self.backend.linear_s,
                self.wait_s,
                self.metrics,
            )
            self.backend.join(self._lockstep)

    def member_left(self, member: Member, reason: str) -> None:
        super().member_left(member, reason)
        if self._lockstep is not None:
            self._lockstep.left(member)

    def load(self) -> tuple[int, int, int]:
        tokens = sum(sequence.num_tokens for sequence in self._sequences.values())
        return len(self._sequences), tokens, 0

    # -- requests in --

    def assigned(self, msg: Assign) -> None:
        now = monotonic()
        sequence = Sequence(msg, now, now + self.config.timeouts.request_s)
        self._sequences[sequence.key] = sequence
        self.forwards.assigned(sequence)

    def stage_sequence(self, sequence: Sequence) -> None:
        msg, timeouts = sequence.assign, self.config.timeouts
        sequence.admission_s = monotonic() - sequence.since
        # slots, the read, other slots if it is late: as long as either side may take
        sequence.due = monotonic() + 2 * timeouts.stage_s + timeouts.read_s + timeouts.call_s
        # on our own path the buffer also keeps earlier chunks' KV (spec §4), so there is room for all of the prompt
        own_path = msg.read_path is ReadPath.PE
        blocks = self.geometry.blocks_for(sequence.num_tokens) if own_path else msg.pe_blocks
        self.stage(msg, blocks, slice(0, msg.pe_blocks), msg.decode)

    def _on_ready(self, msg: Ready, peer: Peer) -> None:
        sequence = self._sequences.get((msg.request_id, msg.attempt))
        if sequence is not None and not sequence.ready:
            sequence.cached, sequence.ready = msg.cached_tokens, True
            sequence.allocation_s, sequence.read_s = sequence.admission_s + msg.allocation_s, msg.read_s
            sequence.due = monotonic() + self.config.timeouts.request_s
            self.forwards.ready(sequence)
            self.wake()

    def drop(self, key: RequestKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.dropped = True
            self.forwards.dropped(sequence)
            self.release(key)
            self.fetch()

    # -- forwards --

    def wake(self) -> None:
        self._wake.set()

    async def _serve(self) -> None:
        while True:
            run = self.forwards.next()
            if run is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._strike(run)
            await self._compute(run)
            self.forwards.computed(run)

    async def _strike(self, run: Run) -> None:
        """Fault seam of compute: requests of the forward may be failed here."""
        for sequence in run.sequences:
            fault = await self.faults.point("compute", request=sequence.key[0])
            if fault is not None and not sequence.dropped:
                self.request_failed(sequence.key, ErrorCode.INTERNAL, "compute failed by configuration")
                self.drop(sequence.key)

    async def _compute(self, run: Run) -> None:
        for sequence in run.sequences:
            if not sequence.started and not sequence.dropped:
                started = sequence.start()
                self._cached_tokens.inc(started.cached_tokens)
                self._computed_tokens.inc(started.computed_tokens)
                self.to_frontend(sequence.assign.request, started)
        if all(sequence.dropped for sequence in run.sequences):
            for step in range(len(run.steps)):
                await run.steps.opened(step)
                run.steps.computed(step)
            return
        begun = monotonic()
        tokens = await self.backend.prefill(run.batch, run.steps)
        for piece in run.batch:
            place, requests = piece.place, len(run.batch)
            self.tracer.span(
                "prefill", place.request_id, begun, cached=place.cached, new=place.new, last=place.last, batch=requests
            )
        if self._lockstep is not None:
            self._lockstep.part(self.forwards.planned)
        if (attention_s := self.backend.attention_s) is not None:
            self._attention.inc(sum(attention_s(piece.place.cached, piece.place.new) for piece in run.batch))
        for sequence, sampled in zip(run.sequences, tokens, strict=True):
            if sampled is not None and not sequence.dropped and sequence.key not in run.failed:
                self._first_token(sequence, sampled)

    def pack(self, sequences: list[Sequence], rows: int) -> list[Chunk]:
        """The next forward, FIFO, in so many rows of a layer slot."""
        settings = self.settings
        budget = Budget(settings.max_batch_tokens, rows, settings.max_batch_requests)
        return pack([sequence.pending for sequence in sequences], budget, self.geometry.block_size, self._quota)

    def _make_quota(self) -> Quota | None:
        """The compute quota (spec §8), if there is one. ConfigError if nothing predicts what it bounds."""
        limit_s, attention_s = self.settings.quota_s, self.backend.attention_s
        if not limit_s:
            return None
        if attention_s is None:
            raise ConfigError("prefill.quota_s needs perf.predictor: make one with `dualpath profile`")
        return Quota(limit_s, attention_s)

    def tell(self, msg: object) -> None:
        """One-way to our traffic manager."""
        try:
            self.traffic_manager.send(msg)
        except DualPathError as error:  # we are shutting down, or our traffic manager is gone and so are we
            self.log.debug("traffic manager not reached", error=str(error))

    def _first_token(self, sequence: Sequence, sampled: Sampled) -> None:
        request, key, token = sequence.assign.request, sequence.key, sampled.token
        finish = finish_reason(token, request.num_generated + 1, request.sampling, self.backend.eos_token_ids)
        self.to_frontend(request, Tokens([Token(*key, request.num_generated, token, sampled.logprobs)]))
        try:
            self.node.link(sequence.assign.decode.control).send(FirstToken(*key, token, sequence.cached, finish))
        except DualPathError as error:
            self.request_failed(key, error.code, f"decode engine not reached: {error.message}")
            self.drop(key)

    def lost(self, sequence: Sequence) -> None:
        """Its KV did not come, or did not arrive."""
        self.request_failed(sequence.key, ErrorCode.TRANSFER_FAILED, "KV rows did not arrive")
        self.drop(sequence.key)

    def delivered(self, sequence: Sequence) -> None:
        """All of its rows are."""
        self.to_scheduler(PrefillDone(*sequence.key))
        self.drop(sequence.key)

    def check_progress(self, now: float) -> None:
        if self.forwards.overdue(now):
            raise DualPathError(ErrorCode.TRANSFER_FAILED, f"rows of a forward were not sent within {self.wait_s:g} s")

    # -- end --

    def check_integrity(self) -> None:
        """AssertionError if device memory is lost."""
        self.forwards.pool.check_integrity()

    async def drain(self) -> None:
        while self._sequences or self.forwards.in_hand:
            await asyncio.sleep(0.02)

    async def shut(self) -> None:
        if hasattr(self, "forwards"):
            self.forwards.abandon()
        await super().shut()
