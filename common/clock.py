"""Time, injected: services read monotonic time, tests whatever they like."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds on a monotonic scale whose zero means nothing."""

monotonic: Clock = time.monotonic
