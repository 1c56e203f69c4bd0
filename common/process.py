"""One service as a process: logging, signals, the ready line for a launcher, the exit status."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from common.collector import collect_when_calm
from common.config import LogConfig
from common.errors import ConfigError
from common.log import setup_logging
from common.service import Service
from common.watchdog import WatchedLoop


def run_service(
    build: Callable[[], Service], log: LogConfig, ready_fd: int | None = None, lifeline_fd: int | None = None
) -> int:
    """Run one service as this process; returns its exit status.

    log: set up before build(), which binds loggers. ready_fd: one line of JSON (name, control, pid ...) goes there
    once the service is ready. lifeline_fd: end when the other end of this pipe closes, so that a launcher that is
    killed leaves nobody behind.
    """
    setup_logging(log.level, log.format)
    try:
        return uvloop.run(_run(build, ready_fd, lifeline_fd), loop_factory=WatchedLoop)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _run(build: Callable[[], Service], ready_fd: int | None, lifeline_fd: int | None) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    _allow_open_files()

    def signalled() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    def orphaned() -> None:
        assert lifeline_fd is not None
        loop.remove_reader(lifeline_fd)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, signalled)
    if lifeline_fd is None:
        loop.add_signal_handler(signal.SIGINT, signalled)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for whoever started us
        loop.add_reader(lifeline_fd, orphaned)
    gc.disable()  # nearly all that a start makes is here to stay: looking for garbage in it takes a fifth of the time
    service = build()
    if isinstance(loop, WatchedLoop):
        service.metrics.registry.register(loop.times)
    starting: asyncio.Task[Any] = asyncio.create_task(service.start())
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        starting.result()
        gc.freeze()  # nor need later collections look at it: that takes tens of milliseconds
        gc.enable()
        if service.calm() is not None:
            service.spawn(collect_when_calm(lambda: bool(service.calm())), "garbage collector")
        if ready_fd is not None:
            with os.fdopen(ready_fd, "w") as ready:
                ready.write(json.dumps(service_address(service)) + "\n")
        failing = asyncio.create_task(service.failed.wait())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        if service.failure is not None:
            service.log.error("service failed", error=str(service.failure))
            return 1
        return 0
    finally:
        stopping.cancel()
        await service.stop(drain=stop.is_set())


def _allow_open_files() -> None:
    """As many as the hard limit allows: each client is one, and so is each block on its way out of a file. The soft
    limit is low for the sake of select(), which nothing here uses."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def service_address(service: Service) -> dict[str, Any]:
    """What a launcher learns from the ready line."""
    address = {
        "name": service.name,
        "role": service.role.value,
        "control": service.node.endpoint,
        "health": service.health.url,
        "pid": os.getpid(),
    }
    url = getattr(service, "url", None)
    return {**address, "url": url} if url else address
