"""NICs paced in user space: transfers cut into pieces that wait for their turn on the wire (common.transport.pacing).

A transfer goes through its own interface outwards and through the target's inwards: local copies too, because all
traffic of a GPU goes through its CNIC (paper §5). Both directions of each are paced in the process that writes. So an
interface is paced exactly where one process writes through it or to it (the storage gateway to each node's SNIC), and
approximately where several do, each of which has its whole rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from common.metrics import Metrics
from common.transport.base import Intent, TransferError, cut_runs
from common.transport.classes import CLASS_OF_INTENT, TRAFFIC_CLASSES
from common.transport.mover import Job, Mover
from common.transport.pacing import Pacer, Piece
from common.transport.region import RegionDescriptor

#: A piece takes the wire for about so long, or has MIN_PIECE_BYTES: below that, moving it costs more than it is worth.
PIECE_S = 0.002
MIN_PIECE_BYTES = 128 << 10
MAX_PIECE_BYTES = 1 << 30
#: Timers of the event loop are no finer: what is due within this time is due.
TICK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Nic:
    """An interface. name: NODE/snic or NODE/ENGINE/cnic, apart from all others of the cluster; rate: bytes a second,
    each way, to which it is paced (0: not paced)."""

    name: str
    rate: float = 0.0


class Line:
    """One direction of a paced NIC, on the event loop.

    queued: bytes of transfers under way that have not had their turn yet, by class.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.queued = [0] * len(TRAFFIC_CLASSES)
        self._pacer = Pacer(rate, len(TRAFFIC_CLASSES))
        self._waiting: dict[Piece, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self, num_bytes: int, priority: int, since: float) -> float:
        """Wait for the wire; when the piece has started on it, time.monotonic() seconds."""
        piece = Piece(num_bytes, priority)
        self._pacer.ask(piece, since)
        self._grant()
        if piece.start is None:
            woken = self._waiting[piece] = asyncio.get_running_loop().create_future()
            try:
                await woken
            except asyncio.CancelledError:
                self._waiting.pop(piece, None)
                self._pacer.withdraw(piece)
                raise
        assert piece.start is not None
        return piece.start

    def _grant(self) -> None:
        for piece in self._pacer.grant(time.monotonic() + TICK_S):
            woken = self._waiting.pop(piece, None)
            if woken is not None and not woken.done():
                woken.set_result(None)
        due_at = self._pacer.due_at
        if due_at is not None and self._timer is None:
            wait_s = max(0.0, due_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._grant()


class Nics:
    """Moves jobs through the NICs between their ends, at their pace, and counts the bytes. own: this endpoint's."""

    def __init__(self, own: Nic | None, metrics: Metrics) -> None:
        labels = ("nic", "direction", "traffic_class", "intent")
        self._bytes = metrics.counter("nic_bytes", "Bytes written, through the writer's NIC and the target's", labels)
        self._queued = metrics.gauge("nic_queued_bytes", "Bytes that wait for a paced NIC", labels[:3])
        self._own = own
        self._tx = self._line(own.name, own.rate, "tx") if own is not None and own.rate > 0 else None
        self._rx: dict[tuple[str, float], Line] = {}

    def paced(self, target: RegionDescriptor) -> bool:
        """Whether a NIC on the way there is."""
        return bool(self._lines(target))

    async def move(self, mover: Mover, job: Job) -> None:
        """Mover.move(), paced; nothing but that where no NIC on the way is."""
        lines = self._lines(job.batch.target)
        if not lines:
            await self._move(mover, job, job.batch.num_bytes)
            return
        try:
            async with asyncio.timeout(job.deadline - time.monotonic()):
                await self._move_paced(lines, mover, job)
        except TimeoutError:
            raise TransferError("over its deadline before the paced NIC had taken all of it") from None

    async def _move_paced(self, lines: list[Line], mover: Mover, job: Job) -> None:
        priority = TRAFFIC_CLASSES.index(CLASS_OF_INTENT[job.intent])
        left = job.batch.num_bytes
        for line in lines:
            line.queued[priority] += left
        since = ends = time.monotonic()
        try:
            for piece in cut_job(job, min(line.rate for line in lines)):
                num_bytes = piece.batch.num_bytes
                for line in lines:
                    # in virtual time from line to line and from piece to piece: being woken late costs nothing
                    since = await line.turn(num_bytes, priority, since)
                    ends = max(ends, since + num_bytes / line.rate)
                left -= num_bytes
                for line in lines:
                    line.queued[priority] -= num_bytes
                await self._move(mover, piece, num_bytes)
        finally:
            for line in lines:
                line.queued[priority] -= left
        if ends - time.monotonic() > TICK_S:
            await asyncio.sleep(ends - time.monotonic())  # until the last byte is through

    async def _move(self, mover: Mover, job: Job, num_bytes: int) -> None:
        await mover.move(job)
        self.count(job.batch.target, job.intent, num_bytes)

    def count(self, target: RegionDescriptor, intent: Intent, num_bytes: int) -> None:
        """These bytes have been moved there."""
        traffic_class = CLASS_OF_INTENT[intent].name
        for nic, direction in ((self._own.name if self._own else "", "tx"), (target.nic, "rx")):
            if nic:
                self._bytes.labels(nic, direction, traffic_class, intent.value).inc(num_bytes)

    def _lines(self, target: RegionDescriptor) -> list[Line]:
        lines = [] if self._tx is None else [self._tx]
        if target.rate > 0:
            key = (target.nic, target.rate)
            if key not in self._rx:
                self._rx[key] = self._line(target.nic, target.rate, "rx")
            lines.append(self._rx[key])
        return lines

    def _line(self, nic: str, rate: float, direction: str) -> Line:
        line = Line(rate)
        for index, traffic_class in enumerate(TRAFFIC_CLASSES):
            gauge = self._queued.labels(nic, direction, traffic_class.name)
            gauge.set_function(partial(line.queued.__getitem__, index))
        return line


def cut_job(job: Job, rate: float) -> Iterator[Job]:
    """The same bytes as jobs of a piece each."""
    most = max(MIN_PIECE_BYTES, int(min(rate * PIECE_S, MAX_PIECE_BYTES)))
    if job.batch.num_bytes <= most:
        yield job
        return
    for index, runs in enumerate(cut_runs(job.batch.runs, most)):
        yield replace(job, batch=replace(job.batch, runs=runs), corrupt=job.corrupt and index == 0)
