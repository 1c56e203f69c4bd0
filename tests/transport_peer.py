"""A peer process for transport tests: python -m tests.transport_peer KIND SIZE HOST.

Registers SIZE bytes and prints the region's descriptor (a hex control message). Then answers each line on stdin with a
line: "digest" with the digest of the memory, "deregister" once the region is withdrawn. Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from typing import IO

import uvloop
from xxhash import xxh3_64_hexdigest

from common.config import NetworkConfig
from common.faults import Faults
from common.log import setup_logging
from common.metrics import Metrics
from common.transport.memory import Memory
from common.transport.region import RegionDescriptor
from common.transport.select import open_transport
from common.wire import decode, encode
from tests.rdma_support import ends


async def main(kind: str, size: int, host: str) -> None:
    network = NetworkConfig(transport=kind)  # type: ignore[arg-type]
    transport = open_transport(network, host, Metrics(), Faults([], "peer"), 10.0)
    await transport.start()
    memory = Memory.create("peer", size)
    region = transport.register(memory)
    print(encode(region).hex(), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line == "deregister":
            await transport.deregister(region)
        print(xxh3_64_hexdigest(memory.view) if line == "digest" else line, flush=True)
    await transport.close()
    memory.close()


class Peer:
    """Our handle of such a process."""

    def __init__(self, process: Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self.region: RegionDescriptor = decode(bytes.fromhex(self._out.readline()))

    def ask(self, line: str) -> str:
        self._in.write(f"{line}\n")
        self._in.flush()
        return self._out.readline().strip()


@contextmanager
def running_peer(kind: str, size: int, host: str | None = None) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.transport_peer", kind, str(size), host or ends(kind)[1]]
    process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    with process:
        try:
            yield Peer(process)
        finally:
            process.kill()


if __name__ == "__main__":
    setup_logging()  # to standard error: our answers are on standard output
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
