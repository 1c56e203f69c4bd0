"""What TCP sockets need to be told, and asked, beside their bytes."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address

#: Of congestion controls: always there, and anybody may choose it.
_UNPACED = b"reno"


def do_not_pace_loopback(sock: socket.socket, address: str) -> None:
    """Leave pacing out on a socket that is to connect to, or listens at, a loopback address: no path there could be
    congested. Congestion control that paces (BBR) sets timers for what it holds back, which run where acknowledgements
    are processed: up to half of a receiver's CPU time. Before the connection is made, or it goes on. Elsewhere the
    system's choice is left alone."""
    if ip_address(address).is_loopback:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def check_not_reset(sock: socket.socket) -> None:
    """ConnectionResetError if the peer has reset the connection, however much of what it sent is still to be read. A
    loop may tell of that only once (libuv's do), and a read before that shows nothing of it."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
