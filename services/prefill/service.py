"""The prefill engine (paper §3): layerwise, chunked prefill; samples each request's first token and streams it.

    assigned -> staging -> ready (FIFO) -> in forwards, chunk by chunk -> first token out, rows delivered -> done
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.clock import monotonic
from common.config import PrefillConfig
from common.errors import DualPathError, ErrorCode
from common.finish import finish_reason
from common.messages import (
    Assign,
    BeginForward,
    Capacity,
    FirstToken,
    ForwardDrained,
    LayersComputed,
    LayersLoaded,
    PrefillDone,
    PrefillStarted,
    Ready,
    SequenceSlice,
    Token,
    Tokens,
)
from common.rpc import Peer
from common.types import ReadPath, RequestKey, Role
from services.engine.service import LAYER_TRANSFERS, EngineService
from services.prefill.batching import Budget, Chunk, Pending, pack
from services.prefill.forward import ForwardRun


@dataclass(slots=True)
class _Sequence:
    """A request of ours. due: when it is given up. cached: hit tokens, known once it is ready; computed: tokens of
    earlier chunks."""

    assign: Assign
    due: float
    cached: int = 0
    computed: int = 0
    allocation_s: float = 0.0
    read_s: float = 0.0
    ready: bool = False
    started: bool = False

    @property
    def pending(self) -> Pending:
        request = self.assign.request
        cached = self.cached + self.computed
        return Pending((request.request_id, request.attempt), cached, request.num_tokens - cached)


class PrefillEngine(EngineService[_Sequence]):
    """One device. Requests whose reads are done are served strictly FIFO."""

    role = Role.PREFILL

    @property
    def settings(self) -> PrefillConfig:
        return self.config.prefill

    def capacity(self, buffer_blocks: int) -> Capacity:
        assert self.memory is not None
        rows = self.memory.max_slot_rows(2)  # layerwise prefill needs two layers at once, no more
        limit = min(self.directory.max_context_tokens, rows, buffer_blocks * self.geometry.block_size)
        return Capacity(limit, buffer_blocks, rows)

    async def open(self) -> None:
        await super().open()
        self._ready: dict[RequestKey, None] = {}  # in order of readiness
        self._wake = asyncio.Event()
        self._run: ForwardRun | None = None
        self._next_forward = 0
        self._computed_tokens = self.metrics.counter("prefill_tokens", "Prompt tokens computed")
        self._cached_tokens = self.metrics.counter("cached_tokens", "Prompt tokens found in storage")
        self.metrics.gauge("device_memory_peak_bytes", "Most KV bytes in device memory at once").set_function(
            lambda: self.memory.peak_bytes if self.memory else 0
        )
        on = self.node.on
        on(Ready, self._on_ready)
        on(LayersLoaded, self._on_layers_loaded)
        on(ForwardDrained, self._on_drained)
        self.spawn(self._serve(), "serve", essential=True)

    def load(self) -> tuple[int, int, int]:
        tokens = sum(sequence.assign.request.num_tokens for sequence in self._sequences.values())
        return len(self._sequences), tokens, 0

    # -- requests in --

    def assigned(self, msg: Assign) -> None:
        request = msg.request
        timeouts = self.config.timeouts
        # slots, the read, other slots if it is late: as long as either side may take
        staged_s = 2 * timeouts.stage_s + timeouts.read_s + timeouts.call_s
        self._sequences[(request.request_id, request.attempt)] = _Sequence(msg, monotonic() + staged_s)
        # on our own path the buffer also keeps earlier chunks' KV (spec §4), so there is room for all of the prompt
        own_path = msg.read_path is ReadPath.PE
        blocks = self.geometry.blocks_for(request.num_tokens) if own_path else msg.pe_blocks
        self.stage(msg, blocks, slice(0, msg.pe_blocks), msg.decode)

    def _on_ready(self, msg: Ready, peer: Peer) -> None:
        key = (msg.request_id, msg.attempt)
        sequence = self._sequences.get(key)
        if sequence is not None and not sequence.ready:
            sequence.cached, sequence.ready = msg.cached_tokens, True
            sequence.allocation_s, sequence.read_s = msg.allocation_s, msg.read_s
            sequence.due = monotonic() + self.config.timeouts.request_s
            self._ready[key] = None
            self._wake.set()

    def drop(self, key: RequestKey) -> None:
        self._ready.pop(key, None)
        if self._sequences.pop(key, None) is not None:
            self.release(key)
            self.fetch()

    # -- forwards --

    async def _serve(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._pack()
            if not batch:
                self._wake.clear()
            elif not await self._struck(batch):
                await self._forward(batch)

    async def _struck(self, batch: list[Chunk]) -> bool:
        """Fault seam of compute: True if a request of the batch was failed, or left during a delay."""
        for chunk in batch:
            fault = await self.faults.point("compute", request=chunk.key[0])
            if fault is not None and chunk.key in self._sequences:
                self.request_failed(chunk.key, ErrorCode.INTERNAL, "compute failed by configuration")
                self.drop(chunk.key)
        return any(chunk.key not in self._sequences for chunk in batch)

    def _pack(self) -> list[Chunk]:
        assert self.memory is not None
        settings = self.config.prefill
        budget = Budget(settings.max_batch_tokens, self.memory.max_slot_rows(2), settings.max_batch_requests)
        return pack([self._sequences[key].pending for key in self._ready], budget, self.geometry.block_size)

    async def _forward(self, batch: list[Chunk]) -> None:
        run = self._plan(batch)
        self._run = run
        self.traffic_manager.send(run.plan)
        loop = asyncio.get_running_loop()

        def computed(msg: LayersComputed) -> None:
            loop.call_soon_threadsafe(self._computed, msg)

        wait_s = LAYER_TRANSFERS * self.config.timeouts.transfer_s
        try:
            tokens = await self.compute(run.compute, self.model, self.memory, computed, wait_s)
            for chunk, token in zip(batch, tokens, strict=True):
                if token is not None and chunk.key not in run.failed:
                    self._first_token(chunk.key, token)
            async with asyncio.timeout(wait_s):
                await run.drained.wait()
        finally:
            run.abandon()
            self._run = None
        for chunk in batch:
            self._advance(chunk, run)

    def _computed(self, msg: LayersComputed) -> None:
        try:
            self.traffic_manager.send(msg)
        except DualPathError as error:  # we are shutting down, or our traffic manager is gone and so are we
            self.log.debug("traffic manager not reached", error=str(error))

    def _plan(self, batch: list[Chunk]) -> ForwardRun:
        assert self.memory is not None
        places: list[SequenceSlice] = []
        tokens: list[int] = []
        sampling = []
        row = 0
        for chunk in batch:
            sequence = self._sequences[chunk.key]
            request = sequence.assign.request
            if not sequence.started:
                sequence.started = True
                miss = request.num_tokens - sequence.cached
                self._cached_tokens.inc(sequence.cached)
                self._computed_tokens.inc(miss)
                self.to_frontend(request, self._started(sequence, miss))
            places.append(SequenceSlice(*chunk.key, row, chunk.cached, chunk.new, chunk.last))
            tokens += request.tokens_between(chunk.cached, chunk.cached + chunk.new)
            sampling.append((request.sampling, request.num_generated) if chunk.last else None)
            row += chunk.cached + chunk.new
        fitting = self.memory.budget // (row * self.geometry.row_bytes)
        resident = min(self.config.prefill.resident_layers, self.geometry.num_layers, fitting)
        layers_per_step = max(resident // 2, 1)
        self._next_forward += 1
        plan = BeginForward(self._next_forward, 0, row, 2 * layers_per_step, layers_per_step, places)
        return ForwardRun(plan, tokens, sampling, self.geometry.num_layers)

    def _started(self, sequence: _Sequence, miss: int) -> PrefillStarted:
        assign = sequence.assign
        return PrefillStarted(
            assign.request.request_id,
            assign.request.attempt,
            sequence.cached,
            miss,
            assign.waited_s,
            sequence.allocation_s,
            sequence.read_s,
        )

    def _first_token(self, key: RequestKey, token: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        request = sequence.assign.request
        finish = finish_reason(token, request.num_generated + 1, request.sampling, self.model.eos_token_ids)
        self.to_frontend(request, Tokens([Token(*key, request.num_generated, token)]))
        try:
            self.node.link(sequence.assign.decode.control).send(FirstToken(*key, token, sequence.cached, finish))
        except DualPathError as error:
            self.request_failed(key, error.code, f"decode engine not reached: {error.message}")
            self.drop(key)

    def _advance(self, chunk: Chunk, run: ForwardRun) -> None:
        """What a drained forward means for one of its requests."""
        sequence = self._sequences.get(chunk.key)
        if sequence is None:
            return  # cancelled meanwhile
        if chunk.key in run.failed:
            self.request_failed(chunk.key, ErrorCode.TRANSFER_FAILED, "KV rows did not arrive")
            self.drop(chunk.key)
        elif chunk.last:
            self.to_scheduler(PrefillDone(*chunk.key))
            self.drop(chunk.key)
        else:
            sequence.computed += chunk.new

    def _on_layers_loaded(self, msg: LayersLoaded, peer: Peer) -> None:
        if self._run is not None and msg.forward == self._run.plan.forward:
            self._run.loaded(msg.step, msg.failed)

    def _on_drained(self, msg: ForwardDrained, peer: Peer) -> None:
        if self._run is not None and msg.forward == self._run.plan.forward:
            self._run.failed.update(msg.failed)
            self._run.drained.set()

    # -- end --

    async def drain(self) -> None:
        while self._sequences or self._run is not None:
            await asyncio.sleep(0.02)

    async def shut(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None:
            run.abandon()
        await super().shut()
