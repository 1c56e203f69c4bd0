"""Longest-prefix lookup at the storage gateways: storage is an accelerator, so a late or failed answer is no hit.

Every gateway sees what is stored, but only its own blocks in flight; each answer is good by itself, so the longest
counts. A breaker for each keeps one that does not answer out of the critical path: after a failure it is not asked for
breaker_s, then tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.breaker import Breaker
from common.clock import Clock
from common.config import TimeoutsConfig
from common.errors import DualPathError
from common.log import get_logger
from common.messages import Match, Matched
from common.rpc import Link
from common.types import Request, hit_block_limit


class Lookup:
    """gateways: the links to those that live."""

    def __init__(
        self, gateways: Callable[[], Sequence[Link]], block_size: int, timeouts: TimeoutsConfig, clock: Clock
    ) -> None:
        self._gateways = gateways
        self._block_size = block_size
        self._timeouts = timeouts
        self._clock = clock
        self._breakers: dict[str, Breaker] = {}  # by endpoint, of gateways that live
        self._log = get_logger()

    async def hit_blocks(self, request: Request) -> int:
        """How many leading blocks of the prompt are stored, at least one token left out (spec §4). Never raises."""
        limit = hit_block_limit(request.num_tokens, self._block_size)
        keys = request.block_keys[:limit]
        if not keys:
            return 0
        match, gateways = Match(b"".join(keys)), list(self._gateways())
        breakers = {link.endpoint: self._breakers.get(link.endpoint) or self._breaker() for link in gateways}
        self._breakers = breakers
        asked = [self._ask(link, match, breakers[link.endpoint]) for link in gateways]
        return min(max(await asyncio.gather(*asked), default=0), len(keys))

    async def _ask(self, gateway: Link, match: Match, breaker: Breaker) -> int:
        if breaker.open:
            return 0
        try:
            matched: Matched = await gateway.call(match, self._timeouts.lookup_s)
        except DualPathError as error:
            breaker.trip()
            self._log.warning("lookup failed; prompts are recomputed for a while", error=str(error))
            return 0
        return matched.blocks

    def _breaker(self) -> Breaker:
        return Breaker(self._timeouts.breaker_s, self._clock)
