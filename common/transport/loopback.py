"""TCP between processes of one host: there is no path that could be congested."""

from __future__ import annotations

import socket
from ipaddress import ip_address

#: Always there, and anybody may choose it.
_UNPACED = b"reno"


def do_not_pace_loopback(sock: socket.socket, address: str) -> None:
    """Leave pacing out on a socket that is to connect to, or listens at, a loopback address. Congestion control that
    paces (BBR) sets timers for what it holds back, which run where acknowledgements are processed: up to half of a
    receiver's CPU time. Before the connection is made, or it goes on. Elsewhere the system's choice is left alone."""
    if ip_address(address).is_loopback:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
