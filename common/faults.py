"""Fault seams: delay, fail, duplicate, drop or corrupt one transfer, storage call or message, chosen by request, block
or message type. Configured like everything else ([[faults]]); empty in normal use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

Point = Literal["message", "transfer", "storage.match", "storage.read", "storage.write", "compute"]
Action = Literal["delay", "fail", "duplicate", "drop", "corrupt"]


class Fault(BaseModel):
    """One rule. Unset selectors match everything; times is how often it strikes (0: always)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    point: Point
    action: Action
    process: str | None = None
    request: str | None = None
    block: int | None = None
    type: str | None = None
    seconds: float = 0.0
    after: int = 0
    times: int = 1


@dataclass(slots=True)
class Faults:
    """The rules that apply to one process, with their counts. strike() is called at every seam."""

    rules: list[Fault]
    process: str
    _seen: dict[int, int] = field(default_factory=dict)

    def strike(
        self, point: Point, *, request: str | None = None, block: int | None = None, type: str | None = None
    ) -> Fault | None:
        """The rule that strikes here and now, or None."""
        for index, rule in enumerate(self.rules):
            if rule.point != point or (rule.process is not None and rule.process != self.process):
                continue
            selectors = ((rule.request, request), (rule.block, block), (rule.type, type))
            if any(want is not None and want != have for want, have in selectors):
                continue
            seen = self._seen[index] = self._seen.get(index, 0) + 1
            if seen > rule.after and (rule.times == 0 or seen <= rule.after + rule.times):
                return rule
        return None

    async def point(self, point: Point, *, request: str | None = None, block: int | None = None) -> Fault | None:
        """strike(), with a delay already waited for; the caller acts on what is returned."""
        rule = self.strike(point, request=request, block=block)
        if rule is not None and rule.seconds:
            await asyncio.sleep(rule.seconds)
        return rule if rule is not None and rule.action != "delay" else None
