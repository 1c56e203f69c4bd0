"""What both engine roles share: the back end that computes, device memory, the traffic manager, fetching work.

The event loop only moves messages. An engine and its traffic manager are one unit of failure: if either goes, so does
the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from common.clock import monotonic
from common.config import Config, EngineConfig
from common.errors import ConfigError, DualPathError, ErrorCode
from common.messages import (
    Assign,
    Attach,
    Attached,
    Cancel,
    Capacity,
    EngineLoad,
    Member,
    ReadQueue,
    Release,
    ReportLoad,
    RequestFailed,
    Stage,
    StageFailed,
)
from common.rpc import Link, Peer
from common.service import Service
from common.transport.memory import host_identity
from common.transport.region import RegionDescriptor
from common.types import KEY_BYTES, Request, RequestKey
from services.engine.backend import Backend
from services.engine.fetching import Fetching
from services.engine.memory import DeviceMemory

if TYPE_CHECKING:
    from services.engine.torch_backend.backend import TorchBackend

#: A layer, and likewise the end of a forward, waits for at most so many transfers, each with its own deadline.
LAYER_TRANSFERS = 4

StartTrafficManager = Callable[[], Awaitable[str]]
"""Starts this engine's traffic manager; returns its control endpoint."""

class Held(Protocol):
    """A request as a role keeps it. due: when it is given up, on common.clock.monotonic()."""

    @property
    def due(self) -> float: ...


S = TypeVar("S", bound=Held)


class EngineService(Service, Generic[S]):
    """Base of the prefill and the decode engine. S: what the role keeps of a request. backend: from open() on."""

    backend: Backend

    def __init__(self, config: Config, name: str, start_traffic_manager: StartTrafficManager) -> None:
        super().__init__(config, name)
        self._start_traffic_manager = start_traffic_manager
        self._sequences: dict[RequestKey, S] = {}
        self._read_q, self._read_rate = 0, 0.0
        self._heard = 0

    # -- for the roles --

    @property
    def settings(self) -> EngineConfig:
        """The role's section of the configuration."""
        raise NotImplementedError

    def capacity(self, buffer_blocks: int) -> Capacity:
        """What to register with."""
        raise NotImplementedError

    def assigned(self, msg: Assign) -> None:
        """A request is ours, within the limits that we registered."""
        raise NotImplementedError

    def drop(self, key: RequestKey) -> None:
        """Forget a request, if we have it: it has ended here, well or badly. What it holds is released."""
        raise NotImplementedError

    def check_progress(self, now: float) -> None:
        """Called regularly. DualPathError if the engine cannot go on."""

    def load(self) -> tuple[int, int, int]:
        """(seq, tok, free device tokens) for the next fetch."""
        raise NotImplementedError

    # -- life --

    async def open(self) -> None:
        self.backend = await open_backend(self.config, self.settings, self.name)
        self.model, self.memory = self.backend.model, self.backend.memory
        self._show_load()
        self.geometry = self.model.manifest.geometry
        self._check_context(self.capacity(self.settings.buffer // self.geometry.full_block_bytes))
        endpoint = await self._start_traffic_manager()
        self.traffic_manager: Link = self.node.link(endpoint)
        attached: Attached = await self.traffic_manager.call(
            Attach(self.incarnation, self.role, self._device_region(self.memory), self.settings.buffer),
            self.config.timeouts.start_s,  # it makes all of its memory present first
        )
        self._traffic_manager_incarnation = attached.incarnation
        self._capacity = self.capacity(attached.buffer_blocks)
        self.max_context_tokens = self._capacity.max_context_tokens
        on = self.node.on
        on(Assign, self._on_assign)
        on(Cancel, self._on_cancel)
        on(ReadQueue, self._on_read_queue)
        on(StageFailed, self._on_stage_failed)

    def _show_load(self) -> None:
        gauge = self.metrics.gauge
        gauge("engine_requests", "Requests assigned to this engine and not ended there").set_function(
            lambda: len(self._sequences)
        )
        gauge("device_memory_bytes", "Device memory for KV").set(self.memory.budget)
        gauge("device_memory_peak_bytes", "Most KV bytes in device memory at once").set_function(
            lambda: self.memory.peak_bytes
        )

    def _check_context(self, capacity: Capacity) -> None:
        """ConfigError if the memory cannot hold even a block of context; before anything else is started."""
        if capacity.max_context_tokens < self.geometry.block_size:
            role = self.role.value
            raise ConfigError(
                f"{role}.device_memory or {role}.buffer holds only {capacity.max_context_tokens} tokens of context: "
                f"enlarge it (a token takes {self.geometry.bytes_per_token} bytes)"
            )

    def _device_region(self, memory: DeviceMemory) -> RegionDescriptor:
        segment = memory.memory
        return RegionDescriptor(b"", segment.size, host_identity(), segment.path, "")

    def describe(self, member: Member) -> Member:
        self.me = replace(
            member,
            group=self.settings.group or f"{self.role.value}@{self.node_name}",
            manifest=self.model.manifest,
            capacity=self._capacity,
            traffic_manager=self.traffic_manager.endpoint,
            traffic_manager_incarnation=self._traffic_manager_incarnation,
        )
        return self.me

    async def start(self) -> None:
        await super().start()
        self.fetching = Fetching(self.me, self.members, self._report, self._send_to, self.to_scheduler)
        self.companions.callback(self.fetching.close)
        self.node.on(ReportLoad, lambda msg, peer: self.fetching.collect(msg))
        self.spawn(self._fetch_regularly(), "fetch", essential=True)

    def member_left(self, member: Member, reason: str) -> None:
        if member.incarnation == self._traffic_manager_incarnation:
            self.fail(DualPathError(ErrorCode.ENGINE_LOST, f"our traffic manager is gone: {reason}"))
        self.fetch()  # our leader may have been that one

    async def shut(self) -> None:
        if hasattr(self, "backend"):
            await self.backend.close()

    def scheduler_replaced(self) -> None:
        self._heard = 0
        for key in list(self._sequences):
            self.drop(key)

    def hand_over(self) -> None:
        for key in list(self._sequences):
            self.request_failed(key, ErrorCode.MOVED, f"{self.name} is shutting down")
            self.drop(key)

    # -- work --

    def fetch(self) -> None:
        """Tell the scheduler, through our group's leader, how loaded we are and that we take more (spec §7)."""
        if hasattr(self, "fetching"):  # a request that comes before is reported with the first regular fetch
            self.fetching.changed()

    def _report(self) -> EngineLoad | None:
        if self.draining:
            return None
        seq, tok, free = self.load()
        return EngineLoad(self.incarnation, seq, tok, self._read_q, free, self._read_rate, self._heard)

    def _send_to(self, member: Member, msg: object) -> None:
        self.node.link(member.control).send(msg)

    async def _fetch_regularly(self) -> None:
        while True:
            now = monotonic()
            self.check_progress(now)
            for key in [key for key, sequence in self._sequences.items() if now > sequence.due]:
                self.request_failed(key, ErrorCode.TRANSFER_FAILED, "what it waited for did not come in time")
                self.drop(key)
            self.fetch()
            await asyncio.sleep(self.config.timeouts.heartbeat_s)

    def _on_assign(self, msg: Assign, peer: Peer) -> None:
        request = msg.request
        self._heard = max(self._heard, msg.number)
        if (request.request_id, request.attempt) in self._sequences:
            return  # repeated
        refusal = self._refusal(request)
        if refusal is not None:
            key = (request.request_id, request.attempt)
            self.request_failed(key, ErrorCode.BAD_REQUEST, refusal)
            self.release(key)  # the other side may have staged it already
            return
        self.assigned(msg)  # the scheduler counts it from here; our next report follows when its read is queued

    def _refusal(self, request: Request) -> str | None:
        """What the front end should have refused: the engine checks again, so that no request can harm the others."""
        if request.num_tokens and np.frombuffer(request.prompt, dtype="<u4").max() >= self.model.vocab_size:
            return f"a token id is out of the vocabulary of {self.model.vocab_size}"
        limit = self.max_context_tokens
        if request.num_tokens < 1 or request.max_new_tokens < 1 or request.num_tokens + request.max_new_tokens > limit:
            return f"prompt of {request.num_tokens} and {request.max_new_tokens} new tokens, limit {limit}"
        return None

    def _on_cancel(self, msg: Cancel, peer: Peer) -> None:
        key = (msg.request_id, msg.attempt)
        if key in self._sequences:
            self.drop(key)
        else:
            self.release(key)  # it never got here, but the other side may count on us

    def _on_read_queue(self, msg: ReadQueue, peer: Peer) -> None:
        self._read_q, self._read_rate = msg.tokens, msg.rate
        self.fetch()

    def _on_stage_failed(self, msg: StageFailed, peer: Peer) -> None:
        key = (msg.request_id, msg.attempt)
        self.request_failed(key, msg.code, msg.detail)
        self.drop(key)

    def stage(self, msg: Assign, blocks: int, hits: slice, peer: Member) -> None:
        """Our traffic manager reserves blocks for the request and reads those of its hit blocks that our side reads.
        peer: the engine on the other side."""
        request = msg.request
        first, stop, _ = hits.indices(msg.hit_blocks)
        self.traffic_manager.send(
            Stage(
                request.request_id,
                request.attempt,
                blocks,
                first,
                request.keys[first * KEY_BYTES : stop * KEY_BYTES],
                msg.read_path,
                peer.traffic_manager,
                peer.traffic_manager_incarnation,
            )
        )

    def release(self, key: RequestKey) -> None:
        """Our traffic manager frees what the request holds."""
        self.traffic_manager.send(Release(*key))

    def request_failed(self, key: RequestKey, code: ErrorCode, detail: str) -> None:
        """This attempt ends here; the scheduler tells everybody else."""
        self.log.warning("request failed", request=key[0], attempt=key[1], code=code.value, detail=detail)
        self.to_scheduler(RequestFailed(*key, code, detail))

    def to_scheduler(self, msg: object) -> None:
        """One-way; a scheduler that is gone is found out by its own silence."""
        try:
            self.scheduler.send(msg)
        except DualPathError as error:
            self.log.warning("scheduler not reached", type=type(msg).__name__, error=str(error))

    def to_frontend(self, request: Request, msg: object) -> None:
        """One-way to the front end that holds the client."""
        try:
            self.node.link(request.reply_to).send(msg)
        except DualPathError as error:
            self.log.warning("front end not reached", type=type(msg).__name__, error=str(error))


async def open_backend(config: Config, settings: EngineConfig, name: str) -> Backend:
    """The back end that the configuration asks for. Imports torch only where a real model is served, and then in a
    thread: it takes seconds, in which this process is to answer."""
    if config.model.profile:
        from services.engine.profiled import ProfiledBackend

        return ProfiledBackend(config, settings, name)
    torch_backend = await asyncio.to_thread(_import_torch_backend)
    return await torch_backend.load(config, settings, name)


def _import_torch_backend() -> type[TorchBackend]:
    from services.engine.torch_backend.backend import TorchBackend

    return TorchBackend
