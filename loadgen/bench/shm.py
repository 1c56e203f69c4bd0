"""The shm transport."""

from __future__ import annotations

from functools import partial

from loadgen.bench.ours import new_event_loop, receive, send

__all__ = ["new_event_loop", "receiver", "sender"]

receiver, sender = partial(receive, "shm"), partial(send, "shm")
