"""Waiting for a block that is on its way into storage."""

from __future__ import annotations

import asyncio

from services.storage_gateway.in_flight import InFlight


async def landed(in_flight: InFlight, key: bytes) -> None:
    """Returns once the block is no longer in flight: stored, or given up. The caller bounds the wait."""
    no_more = asyncio.Event()
    if not in_flight.wait(key, no_more.set):
        return
    try:
        await no_more.wait()
    finally:
        in_flight.forget(key, no_more.set)
