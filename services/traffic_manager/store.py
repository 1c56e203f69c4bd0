"""Blocks to and from storage, through the node's storage NIC (spec §4, labels 1-2 and persistence).

Storage is an accelerator: a block that cannot be read is a miss, one that cannot be stored is given up and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import xxhash

from common.blocks.geometry import BlockGeometry
from common.breaker import Breaker
from common.clock import monotonic
from common.config import TimeoutsConfig
from common.errors import DualPathError, ErrorCode
from common.latest import Latest
from common.log import get_logger
from common.messages import Announce, Announced, BlockResults, Commit, Member, ReadBlocks, Reserve, Reserved
from common.metrics import Metrics
from common.rpc import Link, Node
from common.tasks import settle
from common.transport.base import Batch, Intent, Transport, make_runs
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.types import ReadPath

#: Blocks of one store batch: enough to keep the NIC busy, few enough to share the gateway's buffer.
STORE_BATCH = 8


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """hits: leading blocks that are there. doubt: set where the gateway may still write into the slots; ends when it
    cannot any more."""

    hits: int
    doubt: Coroutine[Any, Any, None] | None = None


class BlockStoreClient:
    """The gateway as one traffic manager sees it. buffer is registered as region on the storage transport.

    gateway: a live one. gone(incarnation) waits until that process has left and can write no more.
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        transport: Transport,
        buffer: Memory,
        node: Node,
        gateway: Callable[[], Member | None],
        gone: Callable[[str], Awaitable[None]],
        incarnation: str,
        timeouts: TimeoutsConfig,
        metrics: Metrics,
    ) -> None:
        self.region: RegionDescriptor = transport.register(buffer)
        self._geometry = geometry
        self._transport = transport
        self._buffer = buffer
        self._node = node
        self._member = gateway
        self._gone = gone
        self._incarnation = incarnation
        self._timeouts = timeouts
        self._read = metrics.counter("storage_read_bytes", "KV bytes read from storage into this node's buffer")
        self._written = metrics.counter("storage_write_bytes", "KV bytes written to storage from this node")
        self._read_by_path = metrics.counter(
            "storage_read_path_bytes", "The same, by the read path of the requests", ("path",)
        )
        self._failed = metrics.counter("storage_failures", "Blocks that could not be read or stored", ("operation",))
        self._announced: dict[bytes, Member] = {}  # blocks on their way, and the gateway that expects each
        self._takes_in: dict[str, RegionDescriptor] = {}  # where a gateway takes blocks in, by its incarnation
        self._departed: Latest[str] = Latest()  # gateways that have left, by incarnation
        self._breaker = Breaker(timeouts.breaker_s, monotonic)
        self._log = get_logger()

    async def read(self, request_id: str, path: ReadPath, keys: list[bytes], slots: list[int]) -> ReadOutcome:
        """Read blocks into slots, for a request on this path. Never raises for storage's sake.

        If the gateway does not answer in time, or at all because it has left, it may still write: outcome.doubt then
        ends when it cannot any more, and until that the slots must be neither used nor given back.
        """
        member = self._member()
        if not keys or member is None or self._breaker.open:
            return ReadOutcome(0)
        gateway = self._node.link(member.control)
        size = self._geometry.full_block_bytes
        offsets = [slot * size for slot in slots]
        call = asyncio.ensure_future(
            gateway.call(
                ReadBlocks(request_id, b"".join(keys), self.region, offsets, self._incarnation), timeout=None
            )
        )
        await asyncio.wait({call}, timeout=self._timeouts.read_s)
        if not call.done():
            self._breaker.trip()
            self._log.warning("storage read is late; the prompt is recomputed", request=request_id)
            self._failed.labels("read").inc(len(keys))
            return ReadOutcome(0, self._quiet(call, member.incarnation))
        error = call.exception()
        if error is not None:
            self._log.warning("storage read failed; the prompt is recomputed", request=request_id, error=str(error))
            self._failed.labels("read").inc(len(keys))
            return ReadOutcome(0, self._quiet(call, member.incarnation) if _unanswered(call) else None)
        results = call.result()
        read = sum(results.ok) * size
        self._read.inc(read)
        self._read_by_path.labels(path.value).inc(read)
        hits = results.ok.index(False) if False in results.ok else len(results.ok)
        self._failed.labels("read").inc(len(keys) - hits)
        return ReadOutcome(hits)

    async def _quiet(self, call: asyncio.Future[BlockResults], gateway: str) -> None:
        """Returns once this read writes nothing any more: it is answered, or the gateway is gone."""
        await asyncio.wait({call})
        if _unanswered(call):
            await self._gone(gateway)

    async def announce(self, keys: list[bytes]) -> list[bool]:
        """Tell storage that these blocks come; which of them it wants. None of them, if it does not answer: then it is
        left aside for a while, because handoffs wait for this."""
        member = self._member()
        if not keys or member is None or self._breaker.open:
            return [False] * len(keys)
        gateway = self._node.link(member.control)
        try:
            announced: Announced = await gateway.call(
                Announce(self._incarnation, b"".join(keys)), self._timeouts.call_s
            )
        except DualPathError as error:
            self._breaker.trip()
            self._log.warning("blocks not announced", error=str(error))
            self._failed.labels("write").inc(len(keys))
            return [False] * len(keys)
        self._announced.update((key, member) for key, wanted in zip(keys, announced.wanted, strict=True) if wanted)
        return announced.wanted

    async def store(self, keys: list[bytes], slots: list[int]) -> None:
        """Store announced blocks from buffer slots. Never raises for storage's sake."""
        done = 0
        while done < len(keys):
            chunk = slice(done, done + STORE_BATCH)
            try:
                done += await self._store(keys[chunk], slots[chunk])
            except DualPathError as error:
                self._log.warning("blocks not stored", blocks=len(keys) - done, error=str(error))
                self._failed.labels("write").inc(len(keys) - done)
                await self.give_up(keys[done:])
                break
        self._forget(keys)

    async def give_up(self, keys: list[bytes]) -> None:
        """Announced blocks that will not come: nobody should wait for them."""
        if not keys:
            return
        commit = Commit(self._incarnation, b"".join(keys), [False] * len(keys), [0] * len(keys))
        try:
            await self._announced_to(keys).call(commit, self._timeouts.call_s)
        except DualPathError as error:
            self._log.debug("gateway did not hear of given-up blocks", error=str(error))
        self._forget(keys)

    def gateway_left(self, incarnation: str) -> None:
        """What is on its way to that gateway fails now, not at its deadline; nothing is sent there any more."""
        self._departed.add(incarnation)
        target = self._takes_in.pop(incarnation, None)
        if target is not None:
            self._transport.give_up(target)

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            self._announced.pop(key, None)

    async def _store(self, keys: list[bytes], slots: list[int]) -> int:
        """Store as many leading blocks as the gateway has room for; returns how many that was."""
        gateway = self._announced_to(keys)
        expects = self._announced[keys[0]].incarnation
        reserved: Reserved = await gateway.call(Reserve(self._incarnation, b"".join(keys)), self._timeouts.store_s)
        if expects in self._departed:  # it has answered, and left before we came to read it
            raise DualPathError(ErrorCode.UNREACHABLE, "the storage gateway that had room for these blocks has left")
        self._takes_in[expects] = reserved.target
        count = len(reserved.offsets)
        if not count:
            raise DualPathError(ErrorCode.STORAGE_FAILED, "the gateway has no room for a block")
        keys, slots = keys[:count], slots[:count]
        size = self._geometry.full_block_bytes
        runs = make_runs([slot * size for slot in slots], reserved.offsets, size)
        sums = asyncio.get_running_loop().run_in_executor(None, self._checksums, slots)
        try:
            await self._transport.write(Batch(self.region, reserved.target, runs), Intent.KV_PERSIST)
        finally:
            await settle(sums)  # whatever becomes of the write: a thread reads the slots until then
        commit = Commit(self._incarnation, b"".join(keys), [True] * count, sums.result())
        results: BlockResults = await gateway.call(commit, self._timeouts.store_s)
        stored = sum(results.ok)
        self._written.inc(stored * size)
        self._failed.labels("write").inc(count - stored)
        return count

    def _announced_to(self, keys: list[bytes]) -> Link:
        """The gateway that expects these blocks, announced in one call. DualPathError UNREACHABLE if it has left."""
        member = self._announced.get(keys[0])
        if member is None:
            raise DualPathError(ErrorCode.UNREACHABLE, "no storage gateway expects these blocks")
        return self._node.link(member.control)

    def _checksums(self, slots: list[int]) -> list[int]:
        size = self._geometry.full_block_bytes
        return [xxhash.xxh3_64_intdigest(self._buffer.view[slot * size : (slot + 1) * size]) for slot in slots]


class FreeStore(BlockStoreClient):
    """Storage of the Oracle (spec §9): every hit is there at once, nothing is stored, and the gateway is not asked."""

    async def read(self, request_id: str, path: ReadPath, keys: list[bytes], slots: list[int]) -> ReadOutcome:
        return ReadOutcome(len(keys))

    async def announce(self, keys: list[bytes]) -> list[bool]:
        return [False] * len(keys)


def _unanswered(call: asyncio.Future[BlockResults]) -> bool:
    """The call has ended without a word from the gateway: the link to it is closed."""
    error = call.exception()
    return isinstance(error, DualPathError) and error.code is ErrorCode.UNREACHABLE
