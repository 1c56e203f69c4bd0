"""The image's health check: whether the process takes work (common.pages).

A container that has lost an address which its process was given, because it was taken off a network and put back there
with another one, cannot be reached under it ever again: the process is told to end, and is restarted with the new one.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
from pathlib import Path

from compose.container.addresses import is_own

#: Where the addresses are noted that the process was given, one a line.
GIVEN = Path("/tmp/addresses")
TIMEOUT_S = 4.0


def main() -> int:
    """Exit status 0 if healthy; says what is wrong, for `docker inspect`."""
    given = GIVEN.read_text().split() if GIVEN.is_file() else []
    if lost := [address for address in given if not is_own(address)]:
        print(f"no longer has {', '.join(lost)}: ending, to begin again with the addresses that there are now")
        os.kill(1, signal.SIGTERM)
        return 1
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ["DUALPATH_HEALTH__PORT"]), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        print(answer.read().decode(errors="replace").strip())
    except OSError as error:
        print(f"no answer: {error}")
        return 1
    return 0 if answer.status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main())
