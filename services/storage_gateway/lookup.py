"""Longest stored prefix, waiting a little for blocks that are just being stored (spec §4)."""

from __future__ import annotations

import asyncio
from itertools import takewhile

from common.storage.base import BlockStore
from services.storage_gateway.in_flight import InFlight
from services.storage_gateway.waiting import landed


class PrefixLookup:
    """patience_s bounds a whole lookup, waiting included."""

    def __init__(self, store: BlockStore, in_flight: InFlight, patience_s: float) -> None:
        self._store = store
        self._in_flight = in_flight
        self._patience_s = patience_s

    async def longest_prefix(self, keys: list[bytes]) -> int:
        """How many leading keys are stored; as many as are known to be when patience ends."""
        found = 0
        try:
            async with asyncio.timeout(self._patience_s):
                while found < len(keys):
                    # taken before the query: what is published while it runs is asked for again
                    coming = {key for key in keys[found:] if key in self._in_flight}
                    found += sum(takewhile(bool, await self._store.exists(keys[found:])))
                    if found == len(keys) or keys[found] not in coming:
                        break
                    await landed(self._in_flight, keys[found])
        except TimeoutError:
            pass  # an answer in time is worth more than a longer one
        return found
