"""The transport that moves nothing and is done at once: free transfers for Oracle (spec §9) and for tests."""

from __future__ import annotations

from common.transport.mover import Job, Mover
from common.transport.region import RegionDescriptor


class NullMover(Mover):
    """Reaches every target and touches none."""

    name = "null"

    def reaches(self, target: RegionDescriptor) -> bool:
        return True

    async def move(self, job: Job) -> None:
        return
