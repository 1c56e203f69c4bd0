"""A whole cluster inside one event loop: real services, real sockets, real shared memory, one process.

Driver stands in for the front end: it submits requests and collects their tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.blocks.hashing import prefix_keys
from common.config import Config, load_config
from common.errors import DualPathError
from common.messages import Cancel, Finished, PrefillStarted, RequestFailed, Submit, Tokens
from common.model import read_configured_model
from common.rpc import Peer
from common.service import Service
from common.types import Request, RequestKey, Role, Sampling, pack_tokens
from services.decode.service import DecodeEngine
from services.prefill.service import PrefillEngine
from services.scheduler.service import Scheduler
from services.storage_gateway.service import StorageGateway
from services.traffic_manager.service import TrafficManager

#: Token ids of a tiny model, without the special ones.
VOCAB = range(3, 500)


def random_prompt(source: int | random.Random, length: int) -> list[int]:
    """source: a seed, or what to draw from."""
    rng = source if isinstance(source, random.Random) else random.Random(source)
    return [rng.choice(VOCAB) for _ in range(length)]


def cluster_config(model: Path | str, blocks: Path, **overrides: Any) -> Config:
    """Small pools, short deadlines. model: a directory, or the name of a profile. overrides: dotted names with __ for
    the dot."""
    values: dict[str, Any] = {
        "model.path" if isinstance(model, Path) else "model.profile": str(model),
        "storage.path": str(blocks),
        "storage.staging": "256KiB",
        "scheduler.control": "tcp://127.0.0.1:*",
        "prefill.device_memory": "4MiB",
        "prefill.buffer": "8MiB",
        "decode.device_memory": "8MiB",
        "decode.buffer": "8MiB",
        "frontend.port": 0,
        "timeouts.lookup_s": 2.0,
        "timeouts.drain_s": 5.0,
        "log.level": "warning",
    }
    values.update({name.replace("__", "."): value for name, value in overrides.items()})
    return load_config(None, values)


@dataclass(slots=True)
class Outcome:
    """What came of one attempt."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    finished: Finished | None = None
    failed: RequestFailed | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)


class Driver(Service):
    """A front end without HTTP."""

    role = Role.FRONTEND

    async def open(self) -> None:
        self.manifest = read_configured_model(self.config).manifest
        self.outcomes: dict[RequestKey, Outcome] = {}
        self._ids = itertools.count()
        on = self.node.on
        on(Tokens, self._on_tokens)
        on(PrefillStarted, self._on_started)
        on(Finished, self._on_finished)
        on(RequestFailed, self._on_failed)

    def request(self, prompt: Sequence[int], sampling: Sampling, *, generated: int = 0, id: str = "", attempt: int = 0):
        packed = pack_tokens(prompt)
        keys = prefix_keys(self.manifest.namespace, packed, self.manifest.geometry.block_size)
        name = id or f"r{next(self._ids)}"
        return Request(name, attempt, self.node.endpoint, packed, keys, sampling, generated)

    async def submit(self, request: Request) -> Outcome:
        outcome = self.outcomes[(request.request_id, request.attempt)] = Outcome()
        await self.scheduler.call(Submit(request), 10.0)
        return outcome

    async def generate(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Outcome:
        """Submit and wait to the end. DualPathError if it fails."""
        sampling = {"ignore_eos": True, **sampling}
        outcome = await self.submit(self.request(prompt, Sampling(max_tokens, **sampling)))
        async with asyncio.timeout(60):
            await outcome.done.wait()
        if outcome.failed is not None:
            raise DualPathError(outcome.failed.code, outcome.failed.detail)
        return outcome

    def cancel(self, request: Request) -> None:
        self.scheduler.send(Cancel(request.request_id, request.attempt))

    def _on_tokens(self, msg: Tokens, peer: Peer) -> None:
        for token in msg.tokens:
            outcome = self.outcomes[(token.request_id, token.attempt)]
            assert token.index >= 0
            outcome.tokens.append(token.token)
            outcome.first_token.set()

    def _on_started(self, msg: PrefillStarted, peer: Peer) -> None:
        outcome = self.outcomes[(msg.request_id, msg.attempt)]
        outcome.cached_tokens, outcome.computed_tokens = msg.cached_tokens, msg.computed_tokens

    def _on_finished(self, msg: Finished, peer: Peer) -> None:
        outcome = self.outcomes[(msg.request_id, msg.attempt)]
        outcome.finished = msg
        outcome.done.set()

    def _on_failed(self, msg: RequestFailed, peer: Peer) -> None:
        outcome = self.outcomes[(msg.request_id, msg.attempt)]
        outcome.failed = msg
        outcome.done.set()


@dataclass(slots=True)
class Cluster:
    """Running services. traffic_managers and engines by engine name."""

    config: Config
    scheduler: Scheduler
    gateway: StorageGateway | None = None
    driver: Driver | None = None
    engines: dict[str, PrefillEngine | DecodeEngine] = field(default_factory=dict)
    traffic_managers: dict[str, TrafficManager] = field(default_factory=dict)

    @property
    def services(self) -> list[Service]:
        """In the order in which they stop."""
        front = [service for service in (self.driver,) if service is not None]
        behind = [service for service in (self.gateway,) if service is not None]
        return [*front, *self.engines.values(), *self.traffic_managers.values(), *behind, self.scheduler]

    def prefill(self, index: int = 0) -> PrefillEngine:
        engine = self.engines[f"prefill-{index}"]
        assert isinstance(engine, PrefillEngine)
        return engine

    def decode(self, index: int = 0) -> DecodeEngine:
        engine = self.engines[f"decode-{index}"]
        assert isinstance(engine, DecodeEngine)
        return engine

    def counter(self, name: str, engine: str | None = None) -> float:
        """A traffic manager's counter, summed over engines or of one."""
        managers = [self.traffic_managers[engine]] if engine else self.traffic_managers.values()
        return sum(manager.metrics.snapshot().get(name, 0.0) for manager in managers)

    async def quiet(self) -> None:
        """Wait until nothing is in hand anywhere; TimeoutError if something stays."""
        async with asyncio.timeout(20):
            while not (
                all(manager.idle for manager in self.traffic_managers.values())
                and self.scheduler.policy.num_waiting + self.scheduler.policy.num_running == 0
                and all(not engine.load()[0] for engine in self.engines.values())
                and all(not engine._tickets for engine in self.engines.values() if isinstance(engine, DecodeEngine))
            ):
                await asyncio.sleep(0.02)

    def check_integrity(self) -> None:
        for service in self.services:
            assert service.failure is None, f"{service.name} has failed: {service.failure!r}"
        for manager in self.traffic_managers.values():
            manager.check_integrity()
        for engine in self.engines.values():
            if isinstance(engine, DecodeEngine):
                engine.check_integrity()
                assert engine.pages.num_free == engine.pages.pool.total, "pages are lost"

    async def add_engine(self, name: str, config: Config) -> None:
        """An engine and its traffic manager, on a node of their own."""
        config = config.model_copy(update={"network": config.network.model_copy(update={"node": name})})

        async def start_traffic_manager() -> str:
            manager = self.traffic_managers[name] = TrafficManager(config, f"{name}.tm")
            await manager.start()
            return manager.node.endpoint

        kind = PrefillEngine if name.startswith("prefill") else DecodeEngine
        self.engines[name] = kind(config, name, start_traffic_manager)
        await self.engines[name].start()


@asynccontextmanager
async def run_cluster(config: Config, prefill: int = 1, decode: int = 1, driver: bool = True) -> AsyncIterator[Cluster]:
    """Start everything, and stop it whatever happens; integrity is checked at the end of a clean run."""
    cluster = Cluster(config, Scheduler(config, "scheduler"))
    try:
        await cluster.scheduler.start()
        control = config.scheduler.model_copy(update={"control": cluster.scheduler.node.endpoint})
        cluster.config = config = config.model_copy(update={"scheduler": control})
        cluster.gateway = StorageGateway(config, "gateway-0")
        await cluster.gateway.start()
        if driver:
            cluster.driver = Driver(config, "driver")
            await cluster.driver.start()
        names = [f"prefill-{index}" for index in range(prefill)] + [f"decode-{index}" for index in range(decode)]
        await asyncio.gather(*(cluster.add_engine(name, config) for name in names))
        yield cluster
        await cluster.quiet()
        cluster.check_integrity()
    finally:
        for service in cluster.services:
            await service.stop(drain=False)
