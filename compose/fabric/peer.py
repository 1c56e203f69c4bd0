"""What measure.py runs on nodes: `python peer.py sink|echo|bulk|ping ADDRESS ...`. Alone, on the standard library.

Servers say "ready" on stdout; every result is one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

CHUNK_BYTES = 256 << 10
SINK_PORT, ECHO_PORT = 5001, 5002
PING_BYTES = 64


def serve(address: str, port: int, answer: bool) -> None:
    """Read whatever comes; send it back, or say how much came how fast (of each connection, when it ends)."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_connection, args=(connection, answer), daemon=True).start()


def _connection(connection: socket.socket, answer: bool) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(CHUNK_BYTES)
    start, total = 0.0, 0
    with connection:
        while count := connection.recv_into(buffer):
            start = start or time.monotonic()
            total += count
            if answer:
                connection.sendall(memoryview(buffer)[:count])
    if not answer:
        print(json.dumps({"bytes": total, "start_s": start, "end_s": time.monotonic()}), flush=True)


def bulk(address: str, seconds: float, flows: int, tos: int) -> None:
    """Send as fast as it goes, on so many connections with this TOS byte."""
    deadline = time.monotonic() + seconds
    chunk = bytes(CHUNK_BYTES)

    def send() -> None:
        with socket.create_connection((address, SINK_PORT)) as sock:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
            while time.monotonic() < deadline:
                sock.sendall(chunk)

    threads = [threading.Thread(target=send) for _ in range(flows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ping(address: str, count: int, interval_s: float, tos: int) -> None:
    """Round trips of a small message, one after the other."""
    message = os.urandom(PING_BYTES)
    times = []
    with socket.create_connection((address, ECHO_PORT)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        for _ in range(count):
            start = time.perf_counter()
            sock.sendall(message)
            left = PING_BYTES
            while left:
                left -= len(sock.recv(left)) or sys.exit("the other side has closed")
            times.append(time.perf_counter() - start)
            time.sleep(interval_s)
    print(json.dumps({"round_trips_s": times}), flush=True)


def main(role: str, address: str, *numbers: str) -> None:
    if role == "bulk":
        bulk(address, float(numbers[0]), int(numbers[1]), int(numbers[2]))
    elif role == "ping":
        ping(address, int(numbers[0]), float(numbers[1]), int(numbers[2]))
    else:
        serve(address, ECHO_PORT if role == "echo" else SINK_PORT, answer=role == "echo")


if __name__ == "__main__":
    main(*sys.argv[1:])
