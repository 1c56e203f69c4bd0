"""Longest-prefix lookup at a storage gateway: storage is an accelerator, so a late or failed answer is no hit.

A breaker keeps a storage that does not answer out of the critical path: after a failure lookups are skipped for
breaker_s, then one is tried again.
"""

from __future__ import annotations

from collections.abc import Callable

from common.breaker import Breaker
from common.clock import Clock
from common.config import TimeoutsConfig
from common.errors import DualPathError
from common.log import get_logger
from common.messages import Match, Matched
from common.rpc import Link
from common.types import Request, hit_block_limit


class Lookup:
    """gateway: the link to a live storage gateway, or None while there is none."""

    def __init__(
        self, gateway: Callable[[], Link | None], block_size: int, timeouts: TimeoutsConfig, clock: Clock
    ) -> None:
        self._gateway = gateway
        self._block_size = block_size
        self._timeouts = timeouts
        self._breaker = Breaker(timeouts.breaker_s, clock)
        self._log = get_logger()

    async def hit_blocks(self, request: Request) -> int:
        """How many leading blocks of the prompt are stored, at least one token left out (spec §4). Never raises."""
        limit = hit_block_limit(request.num_tokens, self._block_size)
        keys = request.block_keys[:limit]
        gateway = self._gateway()
        if not keys or gateway is None or self._breaker.open:
            return 0
        try:
            matched: Matched = await gateway.call(Match(b"".join(keys)), self._timeouts.lookup_s)
        except DualPathError as error:
            self._breaker.trip()
            self._log.warning("lookup failed; prompts are recomputed for a while", error=str(error))
            return 0
        return min(matched.blocks, len(keys))
