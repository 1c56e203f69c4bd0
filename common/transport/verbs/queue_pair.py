"""One reliable connected queue pair, with a completion channel on the event loop.

Nothing is polled while nothing happens: the channel's descriptor becomes readable on the next notice of the peer (or
failure), and all completions are taken then, our own too. A device that is told to spin polls on for a while after each
completion instead.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from common.transport.classes import TrafficClass
from common.transport.verbs.constants import constants
from common.transport.verbs.control import QueuePairAddress
from common.transport.verbs.device import Device
from common.transport.verbs.nics import MTUS

#: A spinning device waits for events again after so many seconds without a completion.
SPIN_S = 0.002
#: Completions taken by one call.
POLL_ENTRIES = 32
#: Acknowledgement timeout 4.096 us * 2^TIMEOUT = 67 ms, seven retries: a link that is gone fails within about a second.
TIMEOUT, RETRIES = 14, 7
#: Credits see to it that the receiver is ready; should its NIC be late all the same, so many retries, 0.64 ms apart.
RECEIVER_RETRIES, RECEIVER_DELAY = 3, 12
MAX_HOPS = 64


class Owner(Protocol):
    """What happens on a queue pair. No call after close()."""

    def noticed(self, number: int) -> None:
        """The peer's next notice: everything that it had written before is in place."""

    def sent(self) -> None:
        """The next of our own signalled requests has ended, and all before it."""

    def drained(self) -> bool:
        """No completion is left. Whether one of our own requests is waited for, which does not come with a notice."""

    def failed(self, reason: str) -> None:
        """It has ended by itself, and has to be closed."""


class QueuePair:
    """sends and receives: so many requests of each kind can be under way."""

    def __init__(self, device: Device, owner: Owner, sends: int, receives: int) -> None:
        """ConnectionError if the device cannot hold another one."""
        self._device = device
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._spin_until = 0.0
        self._spinning = False
        self._psn = secrets.randbits(24)
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        self._fd = -1
        try:
            with _as_connection_error("the device holds no further queue pair"):
                self._open(sends, receives)
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._fd, self._on_event)

    def _open(self, sends: int, receives: int) -> None:
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        device, verbs = self._device, constants()
        self._error = PyverbsError
        self._success, self._received = verbs.IBV_WC_SUCCESS, verbs.IBV_WC_RECV
        self._signalled, self._solicited = verbs.IBV_SEND_SIGNALED, verbs.IBV_SEND_SOLICITED
        self._channel, self._fd = _open_channel(CompChannel, device)
        # requests that are flushed complete, signalled or not
        self._queue = CQ(device.context, sends + receives, None, self._channel, 0)
        limits = QPCap(
            max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1, max_inline_data=device.inline_bytes
        )
        initial = QPInitAttr(qp_type=verbs.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=limits, sq_sig_all=0)
        attributes = QPAttr()
        attributes.port_num = device.place.port.number
        attributes.qp_access_flags = verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE
        self._pair = QP(device.domain, initial, attributes)
        self._receive = _empty_receive(device)
        self._notice = _empty_send(device)
        self.receive(receives)
        self._queue.req_notify(solicited_only=True)

    @property
    def address(self) -> QueuePairAddress:
        """What the peer needs to connect to it."""
        place = self._device.place
        return QueuePairAddress(
            self._pair.qp_num, self._psn, place.gid.gid, place.port.lid, place.mtu, place.port.ethernet
        )

    def connect(self, peer: QueuePairAddress, traffic_class: TrafficClass) -> None:
        """Ready to send and receive, everything that it sends in the class. ConnectionError."""
        with _as_connection_error(f"cannot connect a queue pair to {peer.gid}"):
            self._connect(peer, traffic_class)

    def _connect(self, peer: QueuePairAddress, traffic_class: TrafficClass) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        place = self._device.place
        to_receive = QPAttr()
        to_receive.path_mtu = next(number for number, size in MTUS.items() if size == place.mtu)
        to_receive.dest_qp_num = peer.number
        to_receive.rq_psn = peer.psn
        to_receive.max_dest_rd_atomic = 1
        to_receive.min_rnr_timer = RECEIVER_DELAY
        route = GlobalRoute(
            dgid=GID(peer.gid),
            sgid_index=place.gid.index,
            hop_limit=MAX_HOPS,
            traffic_class=traffic_class.dscp << 2,
        )
        to_receive.ah_attr = AHAttr(
            dlid=peer.lid,
            sl=traffic_class.service_level,
            is_global=int(place.port.ethernet),
            port_num=place.port.number,
            gr=route,
        )
        self._pair.to_rtr(to_receive)
        to_send = QPAttr()
        to_send.timeout = TIMEOUT
        to_send.retry_cnt = RETRIES
        to_send.rnr_retry = RECEIVER_RETRIES
        to_send.sq_psn = self._psn
        to_send.max_rd_atomic = 1
        self._pair.to_rts(to_send)

    def post(self, head: Any) -> None:
        """A linked list of work requests, with one doorbell. ConnectionError."""
        try:
            self._pair.post_send(head)
        except self._error as error:
            raise ConnectionError(f"cannot post: {error}") from None
        if self._device.spin:
            self._spin()

    def notify(self, number: int, signalled: bool) -> None:
        """A notice to the peer that writes nothing. ConnectionError."""
        self._notice.imm_data = number
        self._notice.send_flags = self._solicited | (self._signalled if signalled else 0)
        self.post(self._notice)

    def receive(self, notices: int) -> None:
        """Be ready for so many more notices."""
        for _ in range(notices):
            self._pair.post_recv(self._receive)

    def close(self) -> None:
        """Nothing is read, written or told any more. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
        for part in (self._pair, self._queue, self._channel):
            if part is not None:
                part.close()
        self._pair = self._queue = self._channel = None

    # -- completions --

    def _on_event(self) -> None:
        if not self._take_event():
            return
        if self._device.spin:
            self._spin()
        else:
            self._wait_for_event()

    def _wait_for_event(self) -> None:
        """Ask to be told of the next one, then take those that there are: none can slip through between."""
        for solicited_only in (True, False):
            self._arm(solicited_only)
            self._take()
            if self._queue is None or not self._owner.drained():
                return

    def _take_event(self) -> bool:
        """The channel's next event. Whether there was one."""
        from pyverbs.pyverbs_error import PyverbsRDMAError

        try:
            self._channel.get_cq_event(self._queue)
        except PyverbsRDMAError as error:
            if getattr(error, "error_code", None) != errno.EAGAIN:
                raise
            return False
        self._queue.ack_events(1)
        return True

    def _arm(self, solicited_only: bool) -> None:
        """Have the channel tell of the next completion."""
        self._queue.req_notify(solicited_only=solicited_only)

    def _take(self) -> bool:
        """Hand all completions to the owner, who may close us meanwhile. Whether there were any."""
        any_taken = False
        while self._queue is not None:
            count, completions = self._queue.poll(POLL_ENTRIES)
            if count <= 0:
                return any_taken
            any_taken = True
            for completion in completions:
                if self._queue is None:
                    return True
                if completion.status != self._success:
                    self._owner.failed(_status(completion.status))
                elif completion.opcode & self._received:
                    self._owner.noticed(completion.imm_data)
                else:
                    self._owner.sent()
        return any_taken

    def _spin(self) -> None:
        self._spin_until = time.monotonic() + SPIN_S
        if not self._spinning:
            self._spinning = True
            self._loop.call_soon(self._spin_once)

    def _spin_once(self) -> None:
        if self._queue is None:
            return
        if self._take():
            self._spin_until = time.monotonic() + SPIN_S
            if self._queue is not None:
                self._owner.drained()
        if self._queue is None:
            return
        if time.monotonic() < self._spin_until:
            self._loop.call_soon(self._spin_once)
        else:
            self._spinning = False
            self._wait_for_event()


@contextmanager
def _as_connection_error(what: str) -> Iterator[None]:
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        raise ConnectionError(f"{what}: {error}") from None


def _open_channel(kind: Any, device: Device) -> tuple[Any, int]:
    """A completion channel and its descriptor, which early versions of pyverbs do not tell."""
    before = _event_descriptors()
    channel = kind(device.context)
    fd = getattr(channel, "fd", None)
    if fd is None:
        (fd,) = _event_descriptors() - before
    os.set_blocking(fd, False)
    return channel, int(fd)


def _event_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor of this very listing
            continue
        if "infinibandevent" in target:
            found.add(int(entry.name))
    return found


def _empty_receive(device: Device) -> Any:
    """A receive for a notice; it brings no bytes, but pyverbs wants a place for them."""
    from pyverbs.wr import SGE, RecvWR

    return RecvWR(num_sge=1, sg=[SGE(device.scratch, 1, device.lkey)])


def _empty_send(device: Device) -> Any:
    from pyverbs.wr import SGE, SendWR

    request = SendWR(opcode=constants().IBV_WR_SEND_WITH_IMM, num_sge=1, sg=[SGE(device.scratch, 1, device.lkey)])
    request.num_sge = 0
    return request


def _status(status: int) -> str:
    errors = {number: name for name, number in vars(constants()).items() if re.fullmatch(r"IBV_WC_.*_ERR", name)}
    name = errors.get(status, f"IBV_WC_{status}")
    return f"the NIC reports {name.removeprefix('IBV_WC_').lower().replace('_', ' ')}"
