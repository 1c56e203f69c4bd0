"""What a cluster did between two looks at it, as tables: nodes with queues and NICs, read paths, processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.messages import MemberStatus, Status
from common.types import Role

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MB = 1e6


@dataclass(frozen=True, slots=True)
class Rates:
    """One process's values now, and how much its counters rose a second since the last look."""

    status: MemberStatus
    before: dict[str, float]
    seconds: float

    def now(self, name: str) -> float:
        return self.status.counters.get(name, 0.0)

    def rate(self, name: str) -> float:
        """Of a counter by its whole name, labels included; of a process that is new, since it is there."""
        return max(self.now(name) - self.before.get(name, 0.0), 0.0) / self.seconds

    def rates(self, pattern: str, of: str) -> dict[str, float]:
        """By what the pattern's group `of` finds in the names of counters that it matches."""
        found: dict[str, float] = {}
        for name in self.status.counters:
            match = re.fullmatch(pattern, name)
            if match is not None:
                found[match[of]] = found.get(match[of], 0.0) + self.rate(name)
        return found


def view(before: Status, now: Status, seconds: float) -> Group:
    """Everything, for a terminal."""
    from rich.console import Group

    known = {entry.member.incarnation: entry.counters for entry in before.members}
    processes = [Rates(entry, known.get(entry.member.incarnation, {}), seconds) for entry in now.members]
    head = f"{now.waiting} requests waiting, {now.running} running, {len(processes)} processes"
    return Group(head, _nodes(processes), _paths(processes), _processes(processes))


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", expand=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def _nodes(processes: list[Rates]) -> Table:
    table = _table(
        "nodes (MB/s)", "node", "engines", "to read, tokens", "read", "stored", "SNIC in/out", "CNIC in/out",
        "free slots", "waiting", left=2,
    )  # fmt: skip
    managers = [process for process in processes if process.status.member.role is Role.TRAFFIC_MANAGER]
    for node in sorted({process.status.member.node for process in managers}):
        own = [process for process in managers if process.status.member.node == node]
        engines = sorted(process.status.member.name.removesuffix(".tm") for process in own)

        def total(value: Callable[[Rates], float], own: list[Rates] = own) -> float:
            return sum(value(process) for process in own)

        nics = _nic_rates(processes, node)
        table.add_row(
            node,
            " ".join(engines),
            f"{total(lambda process: process.now('read_queue_tokens')):,.0f}",
            _mb(total(lambda process: process.rate("storage_read_bytes_total"))),
            _mb(total(lambda process: process.rate("storage_write_bytes_total"))),
            *(f"{_mb(nics.get(f'{nic} rx', 0.0))} / {_mb(nics.get(f'{nic} tx', 0.0))}" for nic in ("snic", "cnic")),
            f"{total(lambda process: process.now('buffer_slots_free')):,.0f}",
            f"{total(lambda process: process.now('buffer_waiting_requests')):,.0f}",
        )
    return table


def _nic_rates(processes: list[Rates], node: str) -> dict[str, float]:
    """Bytes a second by interface and direction. Whoever writes counts for both ends of a transfer."""
    rates: dict[str, float] = {}
    pattern = rf"nic_bytes_total\{{direction=(?P<way>\w+),intent=\w+,nic={re.escape(node)}/(?:.+/)?(?P<nic>\w+),.*\}}"
    for process in processes:
        for name in process.status.counters:
            match = re.fullmatch(pattern, name)
            if match is not None:
                key = f"{match['nic']} {match['way']}"
                rates[key] = rates.get(key, 0.0) + process.rate(name)
    return rates


def _paths(processes: list[Rates]) -> Table:
    """KV by read path and by hop (services.traffic_manager.hops)."""
    table = _table("KV", "what", "MB/s")
    for title, pattern in (
        ("read, {} path", r"storage_read_path_bytes_total\{path=(?P<of>\w+)\}"),
        ("moved, {}", r"kv_bytes_total\{hop=(?P<of>\w+)\}"),
    ):
        sums: dict[str, float] = {}
        for process in processes:
            for name, rate in process.rates(pattern, "of").items():
                sums[name] = sums.get(name, 0.0) + rate
        for name, rate in sorted(sums.items()):
            table.add_row(title.format(name), _mb(rate))
    return table


def _processes(processes: list[Rates]) -> Table:
    table = _table("processes", "process", "role", "work", "CPU", "RSS, MB", "loop lag, ms", left=3)
    for process in sorted(processes, key=lambda process: (process.status.member.role, process.status.member.name)):
        member = process.status.member
        table.add_row(
            member.name,
            member.role.value,
            _work(process),
            f"{process.rate('process_cpu_seconds_total'):.0%}",
            f"{process.now('process_resident_memory_bytes') / MB:,.0f}",
            f"{process.now('event_loop_lag_seconds') * 1e3:,.1f}",
        )
    return table


def _work(process: Rates) -> str:
    """What this role does, in one line."""
    match process.status.member.role:
        case Role.PREFILL:
            computed, cached = process.rate("prefill_tokens_total"), process.rate("cached_tokens_total")
            return f"{computed:,.0f} tokens/s computed, {cached:,.0f} hit"
        case Role.DECODE:
            running, free = process.now("decode_running_requests"), process.now("pages_free")
            return f"{process.rate('decode_tokens_total'):,.0f} tokens/s, {running:.0f} running, {free:,.0f} pages free"
        case Role.FRONTEND:
            ended = sum(process.rates(r"(?P<of>requests_total)\{outcome=.*\}", "of").values())
            return f"{process.now('requests_in_hand'):.0f} in hand, {ended:,.1f} requests/s"
        case Role.STORAGE_GATEWAY:
            return f"{process.now('storage_blocks_in_flight'):,.0f} blocks on their way in"
        case Role.SCHEDULER:
            return f"{process.now('requests_waiting'):.0f} waiting, {process.now('requests_running'):.0f} running"
        case _:
            return ""


def _mb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / MB:,.1f}"
