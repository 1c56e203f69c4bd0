"""Full garbage collections at quiet times.

One looks at every object that there is, all at once: with hundreds of requests in hand that keeps the event loop for
tens of milliseconds. Nearly all garbage is freed without it or is found young, so it can wait until little is in hand.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from common.clock import monotonic

#: Seconds between looks at how much is in hand, and after which a collection waits no longer.
LOOK_S, LONGEST_S = 1.0, 600.0
#: Collections of young objects after which a full one is due, as in Python by itself; and a number that is not reached.
DUE, NEVER = 10, 1 << 30


async def collect_when_calm(calm: Callable[[], bool]) -> None:
    """Without end. calm: whether so little is in hand that it takes no time."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    last = monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        if gc.get_count()[2] >= DUE and (calm() or monotonic() - last > LONGEST_S):
            gc.collect()
            last = monotonic()
