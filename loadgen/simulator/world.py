"""What the parts of a run are given of it: the clock, its constants, and somebody who is told what comes of requests.

Parts know this and what is below them; `run` puts them together, and is known to none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import ErrorCode
from loadgen.simulator.clock import Clock
from loadgen.simulator.constants import Constants
from loadgen.simulator.request import Request
from services.scheduler.policy import Load


class Control(Protocol):
    """The scheduler and the front end, as engines see them."""

    def fetched(self, loads: tuple[Load, ...]) -> None:
        """The leader of a group asks for work, for these of its engines."""

    def buffered(self, request: Request) -> None:
        """One of those whose read it waits for is done."""

    def first_token(self, request: Request) -> None:
        """It is there."""

    def prefill_ended(self, request: Request) -> None:
        """Nothing of it remains on its prefill engine."""

    def handed_over(self, request: Request) -> None:
        """Its decode engine's staging buffer is free of it."""

    def ended(self, request: Request) -> None:
        """All of its tokens are there."""

    def erred(self, request: Request, engine: str, code: ErrorCode) -> None:
        """An engine cannot go on with it, and has let go of it."""


@dataclass(frozen=True, slots=True)
class World:
    """Of one run."""

    clock: Clock
    constants: Constants
    control: Control
