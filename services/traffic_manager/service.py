"""The traffic manager process: one per engine; all KV bytes in, out and between engines are its transfers (paper §5).

It owns the staging buffer and maps the engine's device memory. Host-device copies are loopback writes of the same
transport as everything else on the compute NIC, so that one arbiter orders them; the storage NIC has a transport of its
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any
from zlib import crc32

from common.blocks.pool import SlotPool
from common.config import Config
from common.errors import DualPathError, ErrorCode
from common.messages import (
    Attach,
    Attached,
    BeginForward,
    Delivered,
    Done,
    LayersComputed,
    LoadPages,
    Member,
    PeerReleased,
    PeerStaged,
    PersistPages,
    PushRows,
    Release,
    Stage,
)
from common.model import read_configured_model
from common.rpc import Peer
from common.service import Service
from common.transport.base import Batch, Intent
from common.transport.memory import Memory, host_identity
from common.transport.nic import Nic
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.types import Role
from services.traffic_manager.fence import Fence
from services.traffic_manager.forward import Forward
from services.traffic_manager.hops import Hop, Hops
from services.traffic_manager.pages import Pages
from services.traffic_manager.push import PushWindows
from services.traffic_manager.requests import DecodeRequests, PrefillRequests
from services.traffic_manager.runs import Layers, buffer_to_rows
from services.traffic_manager.staging import SlotQueue
from services.traffic_manager.store import STORE_BATCH, BlockStoreClient, FreeStore
from services.traffic_manager.tier import Tier


class TrafficManager(Service):
    """Serves one engine, which attaches once."""

    role = Role.TRAFFIC_MANAGER
    needs = (Role.STORAGE_GATEWAY,)

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._engine: Peer | None = None
        self._attaching = False
        self._memories: list[Memory] = []
        self._forwards: dict[int, Forward] = {}
        self._last_forward = 0
        self._free = config.network.transport == "null"  # Oracle: nothing is read, stored or moved
        self._hops = Hops(self.metrics, self._free)
        timeouts = config.timeouts
        longest_write = max(timeouts.transfer_s, timeouts.read_s)
        self._fence = Fence(host_identity(), timeouts.heartbeat_timeout_s + longest_write)
        self._pages: Pages | None = None
        self.staging: SlotQueue | None = None
        self.persisting: SlotQueue | None = None
        self.tier = Tier(0)

    async def open(self) -> None:
        config = self.config
        directory = await asyncio.to_thread(read_configured_model, config)
        self._manifest = directory.manifest
        self._geometry = self._manifest.geometry
        network, transfer_s = config.network, config.timeouts.transfer_s
        snic = Nic(f"{self.node_name}/snic", network.snic_rate)
        cnic = Nic(f"{self.node_name}/{self.name}/cnic", network.cnic_rate)  # an engine has one of its own
        self._storage = open_transport(network, network.snic, self.metrics, self.faults, transfer_s, snic)
        self._compute = open_transport(network, network.cnic, self.metrics, self.faults, transfer_s, cnic)
        await self._storage.start()
        await self._compute.start()
        self.node.on(Attach, self._on_attach)

    def describe(self, member: Member) -> Member:
        return replace(member, manifest=self._manifest)

    def member_left(self, member: Member, reason: str) -> None:
        self.spawn(self._fence.left(member), f"fence {member.name}")
        if self._engine is None:
            return
        if member.role is Role.TRAFFIC_MANAGER:
            for region in self.requests.peer_left(member.incarnation):
                self._compute.give_up(region)
        elif member.role is Role.STORAGE_GATEWAY:
            self._store.gateway_left(member.incarnation)

    # -- the engine --

    async def _on_attach(self, msg: Attach, peer: Peer) -> Attached:
        if self._attaching:
            raise DualPathError(ErrorCode.BAD_REQUEST, f"{self.name} already has an engine")
        self._attaching = True
        device_memory = Memory.open(msg.device_memory.shm, msg.device_memory.size)
        self._device = await self._adopt(device_memory)
        block_bytes = self._geometry.full_block_bytes
        blocks = msg.buffer_bytes // block_bytes
        persist_blocks = min(STORE_BATCH, max(1, blocks // 8)) if msg.role is Role.DECODE else 0
        self.tier = Tier(self.config.storage.tier // block_bytes if msg.role is Role.PREFILL else 0)
        buffer = Memory.create(f"{self.name}-buffer", (blocks + self.tier.capacity) * block_bytes)
        self._buffer = await self._adopt(buffer)
        await self._storage.pin(buffer)
        self._engine = peer
        blocks -= persist_blocks
        self.staging = SlotQueue(SlotPool(blocks + self.tier.capacity))
        self._store = (FreeStore if self._free else BlockStoreClient)(
            self._geometry,
            self._storage,
            buffer,
            self.node,
            self._gateway,
            self._fence.gone,
            self.incarnation,
            self.config.timeouts,
            self.metrics,
        )
        common: tuple[Any, ...] = (
            self.node,
            self.staging,
            self._store,
            self._geometry.block_size,
            self.config.timeouts,
            self.metrics,
            self._fence,
            self._spawn_transfer,
            self._tell,
            self.tracer,
        )
        if msg.role is Role.DECODE:
            self._serve_decode(DecodeRequests(self._buffer, *common), blocks, persist_blocks)
        else:
            self._serve_prefill(PrefillRequests(self.tier, *common), device_memory)
        self.metrics.gauge("buffer_slots", "Slots of the staging buffer").set(self.staging.pool.total)
        self.metrics.gauge("buffer_slots_free", "Free slots of the staging buffer").set_function(
            lambda: 0 if self.staging is None else self.staging.pool.num_free
        )
        self.metrics.gauge("buffer_waiting_requests", "Requests that wait for staging slots").set_function(
            lambda: 0 if self.staging is None else len(self.staging)
        )
        self.metrics.gauge("tier_blocks", "Blocks kept in the DRAM tier").set_function(lambda: len(self.tier))
        return Attached(blocks, self.incarnation)

    def _tell(self, msg: object) -> None:
        """One-way to our engine. If that is gone so are we, soon; if it does not take its messages, at once."""
        assert self._engine is not None
        try:
            self._engine.send(msg)
        except DualPathError as error:
            self.log.debug("engine not reached", type=type(msg).__name__, error=str(error))
            if error.code is not ErrorCode.UNREACHABLE:
                self.fail(error)

    async def _adopt(self, memory: Memory) -> RegionDescriptor:
        self._memories.append(memory)
        await self._compute.pin(memory)
        return self._compute.register(memory)

    def _spawn_transfer(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Its end is expected to be clean: whatever else happens is a defect, and slots would be lost."""
        return self.spawn(work, name, essential=True)

    def _gateway(self) -> Member | None:
        """Any does: they share the blocks. Ours by highest random weight, so that those of all engines spread and a
        gateway that comes or goes moves few; one that is leaving only if there is no other."""

        def rank(member: Member) -> tuple[bool, int]:
            return member.incarnation not in self.leaving, crc32(f"{self.name} {member.name}".encode())

        return max(self.members_of(Role.STORAGE_GATEWAY), key=rank, default=None)

    def _serve_requests(self, requests: PrefillRequests | DecodeRequests) -> None:
        self.requests = requests
        self.node.on(Stage, lambda msg, peer: requests.stage(msg))
        self.node.on(Release, lambda msg, peer: requests.release(msg.request_id, msg.attempt))

    # -- prefill side --

    def _serve_prefill(self, requests: PrefillRequests, device_memory: Memory) -> None:
        self._serve_requests(requests)
        self._windows = PushWindows(self.node, self.config.timeouts.transfer_s, self._compute, device_memory)
        on = self.node.on
        on(PeerStaged, lambda msg, peer: requests.peer_staged(msg))
        on(BeginForward, lambda msg, peer: self._begin_forward(msg, requests))
        on(LayersComputed, self._on_layers_computed)

    def _begin_forward(self, msg: BeginForward, requests: PrefillRequests) -> None:
        if msg.forward <= self._last_forward:
            return  # repeated
        self._last_forward = msg.forward
        forward = Forward(
            msg,
            requests.live,
            self._geometry,
            self._compute,
            self._buffer,
            self._device,
            self._windows,
            self._hops,
            self._tell,
        )
        self._forwards[msg.forward] = forward
        self._spawn_transfer(self._forward(forward, requests), f"forward {msg.forward}")

    async def _forward(self, forward: Forward, requests: PrefillRequests) -> None:
        delivered = await forward.run()
        del self._forwards[forward.plan.forward]
        for place in delivered:
            if place.last:
                requests.delivered(place.request_id, place.attempt)

    def _on_layers_computed(self, msg: LayersComputed, peer: Peer) -> None:
        if msg.forward in self._forwards:
            self._forwards[msg.forward].computed(msg.step)

    # -- decode side --

    def _serve_decode(self, requests: DecodeRequests, first_persist_slot: int, persist_blocks: int) -> None:
        self._serve_requests(requests)
        assert self.staging is not None
        self.persisting = SlotQueue(SlotPool(persist_blocks, first=first_persist_slot))
        pages = Pages(
            self._geometry,
            self._compute,
            self._buffer,
            self._device,
            requests,
            self.staging,
            self.persisting,
            self._store,
            self._hops,
            self.config.timeouts,
            self._spawn_transfer,
            self._tell,
        )
        on = self.node.on
        on(PeerReleased, lambda msg, peer: requests.peer_quiet(msg.request_id, msg.attempt))
        on(Delivered, lambda msg, peer: self._on_delivered(msg, requests))
        on(PushRows, self._on_push)
        on(LoadPages, self._on_load)
        on(PersistPages, self._on_persist)
        self._pages = pages

    def _on_delivered(self, msg: Delivered, requests: DecodeRequests) -> None:
        requests.peer_quiet(msg.request_id, msg.attempt)
        self._tell(msg)

    async def _on_push(self, msg: PushRows, peer: Peer) -> Done:
        staged = self.requests.staged(msg.request_id, msg.attempt)
        async with staged.use():
            if not 0 <= msg.start < msg.stop <= len(staged.slots) * self._geometry.block_size:
                detail = f"rows [{msg.start}, {msg.stop}) of {len(staged.slots)} staged blocks"
                raise DualPathError(ErrorCode.MALFORMED, detail)
            if not 0 <= msg.first < msg.first + msg.num_layers <= self._geometry.num_layers:
                raise DualPathError(ErrorCode.MALFORMED, f"layers {msg.first} + {msg.num_layers}")
            staged.peer_regions.add(msg.memory)
            layers = Layers(msg.first, msg.num_layers, msg.stride)
            runs = buffer_to_rows(self._geometry, staged.slots, layers, msg.start, msg.stop, msg.target)
            await self._hops.write(self._compute, Batch(self._buffer, msg.memory, runs), Intent.KV_LOAD, Hop.PUSH)
        return Done()

    async def _on_load(self, msg: LoadPages, peer: Peer) -> Done:
        assert self._pages is not None
        return await self._pages.load(msg)

    async def _on_persist(self, msg: PersistPages, peer: Peer) -> Done:
        assert self._pages is not None
        return await self._pages.persist(msg)

    # -- end --

    def check_integrity(self) -> None:
        """AssertionError if a slot is lost."""
        for queue in (self.staging, self.persisting):
            if queue is not None:
                queue.pool.check_integrity()
        self.tier.check_integrity()

    @property
    def idle(self) -> bool:
        """Nothing staged, no slot in use (but by the tier) or in doubt."""
        pools = [queue.pool for queue in (self.staging, self.persisting) if queue is not None]
        lacking = sum(pool.total - pool.num_free for pool in pools)
        return not self._forwards and not self.tier.num_in_use and lacking == len(self.tier)

    async def drain(self) -> None:
        """Our engine has ended before us: what it had staged is void, but blocks on their way to storage arrive."""
        while self._pages is not None and self._pages.num_storing:
            await asyncio.sleep(0.02)

    async def break_off(self) -> None:
        if hasattr(self, "_compute"):
            await asyncio.gather(self._compute.close(), self._storage.close())

    async def shut(self) -> None:
        if hasattr(self, "_compute"):  # what tasks have registered while they ended goes too
            await self._compute.close()
            await self._storage.close()
        for memory in self._memories:
            memory.close()
