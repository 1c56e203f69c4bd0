"""What a cluster says of itself: asked of its scheduler, shown as a table."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from common.config import Config
from common.faults import Faults
from common.messages import GetStatus, MemberStatus, Status
from common.metrics import Metrics
from common.rpc import Node
from common.types import Role

if TYPE_CHECKING:
    from rich.table import Table

STORAGE_READ = "storage_read_bytes_total"


async def get_status(config: Config) -> Status:
    """The scheduler's answer. DualPathError UNREACHABLE if there is none within timeouts.call_s."""
    node = Node(f"operator.{secrets.token_hex(8)}", config.security, Metrics(), Faults([], "operator"))
    try:
        answer: Status = await node.link(config.scheduler.control).call(GetStatus(), config.timeouts.call_s)
        return answer
    finally:
        await node.close()


def read_bytes(status: Status) -> dict[str, int]:
    """Bytes that each node has read from storage, by node."""
    totals: dict[str, int] = {}
    for member in _traffic_managers(status):
        node = member.member.node
        totals[node] = totals.get(node, 0) + int(member.counters.get(STORAGE_READ, 0))
    return dict(sorted(totals.items()))


def status_table(status: Status) -> Table:
    """One row a process."""
    from rich.table import Table

    table = Table(title=f"{status.waiting} requests waiting, {status.running} running", title_justify="left")
    for name in ("process", "role", "node", "state", "pid", "control", "health", "storage read"):
        table.add_column(name, justify="right" if name in ("pid", "storage read") else "left")
    for entry in sorted(status.members, key=lambda entry: (entry.member.role, entry.member.name)):
        member = entry.member
        read = f"{entry.counters.get(STORAGE_READ, 0) / 1e6:,.1f} MB" if entry in _traffic_managers(status) else ""
        state = "draining" if entry.leaving else "up"
        where = (str(member.pid), member.control, member.health)
        table.add_row(member.name, member.role.value, member.node, state, *where, read)
    return table


def _traffic_managers(status: Status) -> list[MemberStatus]:
    return [member for member in status.members if member.member.role is Role.TRAFFIC_MANAGER]
