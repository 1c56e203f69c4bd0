"""The requests staged here, from Stage to the moment when their slots are free again (states in staging.py).

Prefill side: ready once our own hits and the decode side's slots and hits are there (on either path one of the two
reads none; a split read is both); on release it tells the decode side that it is quiet. Decode side: its slots are
exposed to the prefill side's writes from PeerStaged until PeerReleased.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from common.clock import monotonic
from common.config import TimeoutsConfig
from common.errors import DualPathError, ErrorCode
from common.latest import REMEMBERED, Latest
from common.log import get_logger
from common.messages import Delivered, PeerReleased, PeerStaged, ReadQueue, Ready, Stage, StageFailed
from common.metrics import Metrics
from common.perf.read_rate import ReadRate
from common.rpc import Node
from common.tracing import UNTRACED, Tracer
from common.transport.region import RegionDescriptor
from common.types import RequestKey, split_keys
from services.traffic_manager.fence import Fence
from services.traffic_manager.staging import SlotQueue, Staged
from services.traffic_manager.store import BlockStoreClient
from services.traffic_manager.tier import Tier


class StagedRequests:
    """Owns every Staged of one traffic manager. tell(msg) sends to the engine."""

    def __init__(
        self,
        node: Node,
        slots: SlotQueue,
        store: BlockStoreClient,
        block_size: int,
        timeouts: TimeoutsConfig,
        metrics: Metrics,
        fence: Fence,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        tell: Callable[[object], None],
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._tracer = tracer
        self.live: dict[RequestKey, Staged] = {}
        self._node = node
        self._slots = slots
        self._store = store
        self._block_size = block_size
        self._timeouts = timeouts
        self._fence = fence
        self._spawn = spawn
        self._tell = tell
        self._ended: Latest[RequestKey] = Latest()  # a peer's late message is answered instead of waited for
        self._departed: Latest[str] = Latest()  # peers, by incarnation
        self._read_q = 0
        self._rate = ReadRate()
        self._metrics = metrics
        self._read_q_gauge = metrics.gauge("read_queue_tokens", "Hit tokens of staged requests not yet buffered")
        self._late = metrics.counter("messages_late", "Messages of requests that have ended")
        self._log = get_logger()

    def staged(self, request_id: str, attempt: int) -> Staged:
        """DualPathError CANCELLED if it is not staged here (any more)."""
        staged = self.live.get((request_id, attempt))
        if staged is None:
            self._late.inc()
            raise DualPathError(ErrorCode.CANCELLED, f"request {request_id} attempt {attempt} is not staged here")
        return staged

    def peer_left(self, incarnation: str) -> set[RegionDescriptor]:
        """Begin nothing more between us and this peer, a traffic manager. Where something may be on its way to it."""
        self._departed.add(incarnation)
        regions: set[RegionDescriptor] = set()
        for staged in self.live.values():
            if staged.plan.peer_incarnation == incarnation:
                staged.peer_lost = True
                regions |= staged.peer_regions
        return regions

    def stage(self, plan: Stage) -> None:
        """Reserve slots, read hits where this side reads, then go on as the side does."""
        staged = Staged(plan)
        if staged.key in self.live or staged.key in self._ended:
            self._late.inc()  # a duplicate
            return
        staged.peer_lost = plan.peer_incarnation in self._departed
        self.live[staged.key] = staged
        self._adopt(staged)
        staged.work = self._spawn(self._stage(staged), f"stage {plan.request_id}")

    def release(self, request_id: str, attempt: int) -> None:
        """The engine is done with it, well or badly; or it never was staged, and will not be."""
        key = (request_id, attempt)
        staged = self.live.get(key)
        if staged is None or staged.released:
            self._late.inc()
            if staged is None:
                self._end(key)
            return
        staged.released = True
        self._spawn(self._release(staged), f"release {request_id}")

    def take_over(self, request_id: str, attempt: int) -> list[int]:
        """The caller owns the request's slots from now on. DualPathError CANCELLED if it is not staged (any more)."""
        staged = self.staged(request_id, attempt)
        if staged.released:
            raise DualPathError(ErrorCode.CANCELLED, f"request {request_id} was released")
        self._forget(staged)
        return staged.slots

    def _forget(self, staged: Staged) -> None:
        self.live.pop(staged.key, None)
        self._end(staged.key)

    def _end(self, key: RequestKey) -> None:
        self._ended.add(key)

    # -- what the sides do differently --

    def _adopt(self, staged: Staged) -> None:
        """A new request."""

    def _buffered(self, staged: Staged) -> None:
        """Slots are reserved and hits read."""
        raise NotImplementedError

    def _acquire(self, keys: list[bytes]) -> list[int]:
        """Slots that hold the first of these blocks already."""
        return []

    async def _give_back(self, staged: Staged) -> None:
        """Nobody here uses its slots any more. Returns once the other side does not either, having told it that we do
        not touch its, and they are free for others."""
        raise NotImplementedError

    # -- common ground --

    async def _stage(self, staged: Staged) -> None:
        plan, began = staged.plan, monotonic()
        keys = split_keys(plan.keys)
        staged.slots = self._acquire(keys)
        staged.shared = len(staged.slots)
        staged.cached = staged.shared * self._block_size
        keys = keys[staged.shared :]
        self._queue_read(len(keys))
        try:
            await self._allocate(staged)
            allocated = monotonic()
            staged.allocation_s = allocated - began
            self._tracer.span("allocate", plan.request_id, began, allocated, blocks=plan.blocks)
            if keys:
                await self._read(staged, keys)
                staged.read_s = monotonic() - allocated
                hits = staged.cached // self._block_size
                self._tracer.span("read", plan.request_id, allocated, path=plan.path.value, blocks=len(keys), hits=hits)
        except DualPathError as error:
            self._tell(StageFailed(plan.request_id, plan.attempt, error.code, error.message))
            return
        finally:
            self._queue_read(-len(keys))
        staged.buffered = True
        if not staged.released:
            self._buffered(staged)

    async def _allocate(self, staged: Staged) -> None:
        staged.slots += await self._slots.take(staged.plan.blocks - staged.shared, self._timeouts.stage_s)

    async def _read(self, staged: Staged, keys: list[bytes]) -> None:
        plan, first = staged.plan, staged.plan.first + staged.shared
        self._rate.begin(monotonic())
        outcome = await self._store.read(plan.request_id, plan.path, keys, staged.slots[first : first + len(keys)])
        self._rate.end(outcome.hits * self._block_size, monotonic())
        staged.cached += outcome.hits * self._block_size
        if outcome.doubt is not None:
            # the gateway may still write there: set these slots aside and take others
            doubtful = staged.slots[staged.shared :]
            del staged.slots[staged.shared :]
            self._slots.pool.quarantine(doubtful)
            self._spawn(self._settle(outcome.doubt, doubtful), f"late read {plan.request_id}")
            await self._allocate(staged)

    async def _settle(self, doubt: Coroutine[Any, Any, None], slots: list[int]) -> None:
        await doubt
        self._slots.release(slots)

    async def _release(self, staged: Staged) -> None:
        assert staged.work is not None
        if len(staged.slots) < staged.plan.blocks:
            staged.work.cancel()  # still waiting for slots
        await asyncio.wait({staged.work})
        await staged.quiet.wait()
        await self._give_back(staged)
        self._forget(staged)

    def _send(self, control: str, msg: object) -> None:
        try:
            self._node.link(control).send(msg)
        except DualPathError as error:
            self._log.warning("peer not reached", peer=control, type=type(msg).__name__, error=str(error))

    def _queue_read(self, blocks: int) -> None:
        if blocks:
            self._read_q += blocks * self._block_size
            self._read_q_gauge.set(self._read_q)
            self._tell(ReadQueue(self._read_q, self._rate.tokens_per_s))


class PrefillRequests(StagedRequests):
    """The prefill side. tier: keeps blocks that were read."""

    def __init__(self, tier: Tier, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tier = tier
        self._early: OrderedDict[RequestKey, PeerStaged] = OrderedDict()
        self._tier_hits = self._metrics.counter("tier_hit_tokens", "Hit tokens found in this node's DRAM tier")

    def peer_staged(self, msg: PeerStaged) -> None:
        """The decode side has reserved (and, on its path, read); kept if it is ahead of our own Stage."""
        key = (msg.request_id, msg.attempt)
        if msg.released and key not in self.live:
            self._end(key)  # whoever should have told us of it may have gone with that: it never is staged here now
        if key in self._ended:
            self._late.inc()
            self._send(msg.control, PeerReleased(*key))
        elif key in self.live:
            self._meet(self.live[key], msg)
            self._buffered(self.live[key])
        else:
            self._early[key] = msg
            while len(self._early) > REMEMBERED:
                self._early.popitem(last=False)

    def delivered(self, request_id: str, attempt: int) -> None:
        """The decode side's slots hold the whole prompt's KV."""
        staged = self.live.get((request_id, attempt))
        if staged is not None:
            self._send(staged.plan.peer, Delivered(request_id, attempt))

    def _adopt(self, staged: Staged) -> None:
        early = self._early.pop(staged.key, None)
        if early is not None:
            self._meet(staged, early)

    def _meet(self, staged: Staged, peer: PeerStaged) -> None:
        staged.peer_staged = peer
        staged.peer_regions.add(peer.buffer)

    def _end(self, key: RequestKey) -> None:
        super()._end(key)
        early = self._early.pop(key, None)
        if early is not None:  # the decode side has staged what we never shall
            self._send(early.control, PeerReleased(*key))

    def _buffered(self, staged: Staged) -> None:
        if staged.buffered and staged.peer_staged is not None and not staged.released:
            peer = staged.peer_staged
            sides = [(staged.allocation_s, staged.read_s), (peer.allocation_s, peer.read_s)]
            slower = max(sides, key=lambda side: (side[1] > 0, sum(side)))  # of those that have read, if one has
            self._tell(Ready(*staged.key, staged.hits(self._block_size)[1], *slower))

    def _acquire(self, keys: list[bytes]) -> list[int]:
        slots = self._tier.acquire(keys)
        self._tier_hits.inc(len(slots) * self._block_size)
        return slots

    async def _give_back(self, staged: Staged) -> None:
        self._send(staged.plan.peer, PeerReleased(*staged.key))
        shared, cached = staged.shared, staged.cached // self._block_size
        keys = split_keys(staged.plan.keys)
        spare = self._tier.keep(keys[shared:cached], staged.slots[shared:cached])
        self._tier.release(keys[:shared])
        self._slots.give_back(spare + staged.slots[cached:])


class DecodeRequests(StagedRequests):
    """The decode side. buffer: our staging buffer as the prefill side sees it."""

    def __init__(self, buffer: RegionDescriptor, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffer = buffer

    def peer_quiet(self, request_id: str, attempt: int) -> None:
        """The prefill side will not write into our slots any more."""
        staged = self.live.get((request_id, attempt))
        if staged is not None:
            staged.peer_quiet.set()

    def _buffered(self, staged: Staged) -> None:
        staged.exposed = True
        plan = staged.plan
        self._send(
            plan.peer,
            PeerStaged(
                *staged.key,
                self._buffer,
                staged.slots,
                plan.first,
                staged.cached,
                self._node.endpoint,
                staged.allocation_s,
                staged.read_s,
                staged.released,
            ),
        )

    async def _give_back(self, staged: Staged) -> None:
        self._slots.pool.quarantine(staged.slots)
        if staged.exposed:
            await self._quiesce(staged)
        self._slots.release(staged.slots)

    async def _quiesce(self, staged: Staged) -> None:
        """Returns once the prefill side does not touch our slots."""
        gone = asyncio.ensure_future(self._fence.gone(staged.plan.peer_incarnation))
        quiet = asyncio.ensure_future(staged.peer_quiet.wait())
        try:
            patience = self._timeouts.call_s
            while not (await asyncio.wait({gone, quiet}, timeout=patience, return_when=asyncio.FIRST_COMPLETED))[0]:
                self._buffered(staged)  # if the all-clear got lost or never comes, this is answered with another
        finally:
            gone.cancel()
            quiet.cancel()
