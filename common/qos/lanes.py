"""The four lanes of the paper: virtual lanes of InfiniBand, lossless traffic classes of RoCE. Pure.

A lane has the number of the service level that rides it. Collectives have one of their own, KV yields in another one;
what the project does not mark has the lane after the collectives', and one is left to whoever needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.transport.classes import COLLECTIVE, KV, TRAFFIC_CLASSES

NUM_LANES = 4
#: Service levels, and priorities of Ethernet frames: 16 and 8.
SERVICE_LEVELS, PRIORITIES = range(16), range(8)
#: Of what the project does not mark: the code point that Ethernet sees, and the lane.
UNMARKED_DSCP = 0
UNMARKED_LANE = COLLECTIVE.service_level + 1


@dataclass(frozen=True, slots=True)
class Lane:
    """classes: those of the project that ride it; dscps: how Ethernet knows them."""

    number: int
    classes: tuple[str, ...]
    dscps: tuple[int, ...]

    @property
    def low(self) -> bool:
        """Whether it yields to all others."""
        return self.number == KV.service_level

    @property
    def purpose(self) -> str:
        if self.classes:
            return " and ".join(self.classes)
        return "what is not marked" if self.dscps else "free"


def lanes() -> list[Lane]:
    """All four, by number."""
    found = []
    for number in range(NUM_LANES):
        riders = [known for known in TRAFFIC_CLASSES if known.service_level == number]
        dscps = dict.fromkeys(known.dscp for known in riders)
        if number == UNMARKED_LANE:
            dscps = {UNMARKED_DSCP: None}
        found.append(Lane(number, tuple(known.name for known in riders), tuple(dscps)))
    return found


def lane_of(level: int) -> int:
    """Of a service level or priority; one without a lane of its own yields like KV."""
    return level if level < NUM_LANES else KV.service_level
