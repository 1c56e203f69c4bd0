"""Storage gateway: serves the Full Blocks of one block store to schedulers (lookups) and traffic managers (blocks).

Bytes never travel in messages: reads are written one-sided into the caller's region, blocks to store are written by
their source into this process's staging memory (paper §4.1, labels 1-2 and persistence).
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from common.config import Config
from common.errors import ConfigError, DualPathError, ErrorCode
from common.messages import (
    Announce,
    Announced,
    BlockResults,
    Commit,
    Match,
    Matched,
    Member,
    ReadBlocks,
    Reserve,
    Reserved,
)
from common.model import Manifest, read_configured_model
from common.rpc import Peer
from common.service import Service
from common.storage.directory import DirectoryStore
from common.transport.base import Transport
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.types import Role, split_keys
from services.storage_gateway.callers import Callers
from services.storage_gateway.in_flight import InFlight
from services.storage_gateway.lookup import PrefixLookup
from services.storage_gateway.reader import BlockReader
from services.storage_gateway.staging import Staging
from services.storage_gateway.writer import BlockWriter

#: Part of the caller's deadline within which a call is answered: a lookup, and anything else.
LOOKUP_SHARE, CALL_SHARE = 0.8, 0.9
DRAIN_POLL_S = 0.02


class StorageGateway(Service):
    """config.storage says where the blocks are and how much staging memory there is."""

    role = Role.STORAGE_GATEWAY
    manifest: Manifest
    staging: Staging
    in_flight: InFlight
    region: RegionDescriptor

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._opened = AsyncExitStack()
        self._callers = Callers()
        self._transport: Transport | None = None

    async def open(self) -> None:
        storage, timeouts = self.config.storage, self.config.timeouts
        if not storage.path:
            raise ConfigError("storage.path is not set: give the directory of the blocks")
        directory = await asyncio.to_thread(read_configured_model, self.config)
        self.manifest = directory.manifest
        store = DirectoryStore(
            Path(storage.path), self.manifest, self.metrics, verify=storage.verify, concurrency=storage.concurrency
        )
        self.staging = Staging(storage.staging, self.manifest.geometry.full_block_bytes)
        self._opened.callback(self.staging.close)
        self._opened.push_async_callback(store.close)
        await store.open()
        network = self.config.network
        transport = open_transport(network, network.snic, self.metrics, self.faults, timeouts.transfer_s)
        self._opened.push_async_callback(transport.close)
        self._transport = transport
        await transport.start()
        await transport.pin(self.staging.memory)
        self.region = transport.register(self.staging.memory)

        self.in_flight = InFlight(timeouts.store_s)
        self._lookup = PrefixLookup(store, self.in_flight, timeouts.lookup_s * LOOKUP_SHARE)
        self._reader = BlockReader(
            store,
            self.staging.reads,
            self.in_flight,
            self._callers,
            transport,
            self.region,
            self.faults,
            self.spawn,
            storage.concurrency,
            timeouts.read_s * CALL_SHARE,
        )
        self._writer = BlockWriter(
            store,
            self.staging.stores,
            self.in_flight,
            self._callers,
            self.faults,
            self.metrics,
            self.spawn,
            timeouts.call_s * CALL_SHARE,
            timeouts.store_s * CALL_SHARE,
            asyncio.get_running_loop().time,
        )
        free = self.metrics.gauge("storage_staging_slots_free", "Free Full Block slots of the staging memory")
        free.set_function(lambda: self.staging.num_free)
        flying = self.metrics.gauge("storage_blocks_in_flight", "Blocks announced and not yet stored")
        flying.set_function(lambda: len(self.in_flight))
        self.node.on(Match, self._on_match)
        self.node.on(ReadBlocks, self._on_read)
        self.node.on(Announce, self._on_announce)
        self.node.on(Reserve, self._on_reserve)
        self.node.on(Commit, self._on_commit)

    def describe(self, member: Member) -> Member:
        return replace(member, manifest=self.manifest)

    def member_left(self, member: Member, reason: str) -> None:
        self._callers.left(member.incarnation)
        self._reader.left(member.incarnation)
        self._writer.left(member.incarnation)

    async def drain(self) -> None:
        """What has been announced is still taken in: tokens that a client has seen should be hits next time."""
        while self._registered and (len(self.in_flight) or self.staging.in_use):
            await asyncio.sleep(DRAIN_POLL_S)
            self._writer.expire()

    async def break_off(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    async def shut(self) -> None:
        await self._opened.aclose()

    async def _on_match(self, msg: Match, peer: Peer) -> Matched:
        rule = await self.faults.point("storage.match")
        if rule is not None and rule.action == "fail":
            raise DualPathError(ErrorCode.STORAGE_FAILED, "lookup failed by configuration")
        self._writer.expire()
        return Matched(await self._lookup.longest_prefix(_keys(msg.keys)))

    async def _on_read(self, msg: ReadBlocks, peer: Peer) -> BlockResults:
        self._writer.expire()
        keys = _keys(msg.keys)
        return BlockResults(await self._reader.read(msg.request_id, keys, msg.target, msg.offsets, msg.incarnation))

    async def _on_announce(self, msg: Announce, peer: Peer) -> Announced:
        return Announced(await self._writer.announce(msg.incarnation, _keys(msg.keys)))

    async def _on_reserve(self, msg: Reserve, peer: Peer) -> Reserved:
        return Reserved(self.region, await self._writer.reserve(msg.incarnation, _keys(msg.keys)))

    async def _on_commit(self, msg: Commit, peer: Peer) -> BlockResults:
        return BlockResults(await self._writer.commit(msg.incarnation, _keys(msg.keys), msg.ok, msg.checksums))


def _keys(packed: bytes) -> list[bytes]:
    try:
        return split_keys(packed)
    except ValueError as error:
        raise DualPathError(ErrorCode.MALFORMED, str(error)) from None
