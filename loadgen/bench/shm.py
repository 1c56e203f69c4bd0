"""The shm transport."""

from __future__ import annotations

from functools import partial

from loadgen.bench.ours import new_event_loop, receive, send

__all__ = ["active", "new_event_loop", "passive"]

passive, active = partial(receive, "shm"), partial(send, "shm")
