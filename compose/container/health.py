"""The image's health check: whether the process takes work (common.pages).

A container that has lost an address which its process was given, because it was taken off a network and put back there
with another one, cannot be reached under it ever again: the process is told to end, and is restarted with the new one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from compose.container.addresses import is_own

#: Where the addresses are noted that the process was given, one a line.
GIVEN = "/tmp/addresses"
#: All of common.health's answers are shorter.
MAX_ANSWER_BYTES = 1 << 20
TIMEOUT_S = 5.0


def main() -> int:
    """Exit status 0 if healthy; says what is wrong, for `docker inspect`."""
    if lost := [address for address in _given() if not is_own(address)]:
        print(f"no longer has {', '.join(lost)}: ending, to begin again with the addresses that there are now")
        os.unlink(GIVEN)  # told once: a second signal would end it without a drain
        os.kill(1, signal.SIGTERM)
        return 1
    # by hand: an HTTP client takes several times as long to load as all the rest
    try:
        with socket.create_connection(("127.0.0.1", int(os.environ["DUALPATH_HEALTH__PORT"])), TIMEOUT_S) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
            with connection.makefile("rb") as stream:
                head, _, body = stream.read(MAX_ANSWER_BYTES).partition(b"\r\n\r\n")
    except OSError as error:
        print(f"no answer: {error}")
        return 1
    print(body.decode(errors="replace").strip())
    return 0 if head.split()[1:2] == [b"200"] else 1


def _given() -> list[str]:
    try:
        with open(GIVEN) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main())
