"""iperf3 over the loopback, for scale: what one stream of the kernel carries without checksum and without regions."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket

SECONDS = 2
WAIT_S = 20.0


async def iperf3_gib_per_s() -> float | None:
    """None where there is no iperf3, or it fails."""
    program = shutil.which("iperf3")
    if program is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(
        program, "-s", "-1", "-B", "127.0.0.1", "-p", port, stdout=quiet, stderr=quiet
    )
    try:
        await asyncio.sleep(0.5)
        client = await asyncio.create_subprocess_exec(
            *(program, "-c", "127.0.0.1", "-p", port, "-t", str(SECONDS), "-J"),
            stdout=asyncio.subprocess.PIPE,
            stderr=quiet,
        )
        try:
            async with asyncio.timeout(WAIT_S):
                output, _ = await client.communicate()
            return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8 / (1 << 30)
        except (TimeoutError, KeyError, ValueError):
            return None
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()
