"""A live cluster whose processes come and go under load: real services in one event loop, clients over HTTP.

The model is profiled, so that every token of an answer is known beforehand: a request that is lost, cut short or told a
token twice shows.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.config import Config
from common.model import read_configured_model
from common.service import Service
from services.frontend.service import Frontend
from services.scheduler.service import Scheduler
from services.storage_gateway.service import StorageGateway
from tests.cluster import Cluster, cluster_config

#: Seconds between a client's tries to find a front end that takes its request.
AGAIN_S = 0.05
PATIENCE_S = 60.0


def expected_tokens(vocab_size: int, prompt: Sequence[int], count: int) -> list[int]:
    """What a profiled model says after a prompt of this length (services.engine.profiled)."""
    return [((len(prompt) + index) * 7919 + 13) % vocab_size for index in range(count)]


@dataclass(slots=True)
class Live:
    """Processes by name. front ends answer at urls; kill, stop and start any of them."""

    cluster: Cluster
    frontends: dict[str, Frontend] = field(default_factory=dict)
    gateways: dict[str, StorageGateway] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.cluster.config

    async def start(self, name: str) -> None:
        """Start a process, or start it again."""
        kind = name.partition("-")[0]
        if kind in ("prefill", "decode"):
            await self.cluster.add_engine(name, self.config)
        elif kind == "scheduler":
            self.cluster.scheduler = Scheduler(self.config, name)
            await self.cluster.scheduler.start()
        elif kind == "gateway":
            self.gateways[name] = StorageGateway(self.config, name)
            await self.gateways[name].start()
        else:
            self.frontends[name] = Frontend(self.config, name)
            await self.frontends[name].start()

    def take(self, name: str) -> list[Service]:
        """The services of a process, which are the caller's to stop, in this order."""
        if name in self.cluster.engines:
            return [self.cluster.engines.pop(name), self.cluster.traffic_managers.pop(name)]
        if name in self.gateways:
            return [self.gateways.pop(name)]
        if name in self.frontends:
            return [self.frontends.pop(name)]
        return [self.cluster.scheduler]

    async def stop(self, name: str) -> None:
        """SIGTERM."""
        for service in self.take(name):
            await service.stop()
            assert service.failure is None, f"{service.name}: {service.failure!r}"

    async def kill(self, name: str) -> None:
        """It dies without a word, as far as the others are concerned."""
        for service in self.take(name):
            service._registered = False
            await service.stop(drain=False)

    async def restart(self, name: str) -> None:
        await self.stop(name)
        await self.start(name)

    @property
    def services(self) -> list[Service]:
        return [
            *self.frontends.values(), *self.cluster.engines.values(), *self.cluster.traffic_managers.values(),
            *self.gateways.values(), self.cluster.scheduler,
        ]  # fmt: skip

    def retries(self) -> dict[str, float]:
        """Attempts after lost ones, by reason, of the front ends that live."""
        counts: dict[str, float] = {}
        for frontend in self.frontends.values():
            for name, value in frontend.metrics.snapshot().items():
                if name.startswith("retries_total"):
                    counts[name] = counts.get(name, 0) + value
        return counts


@asynccontextmanager
async def live_cluster(
    blocks: Path, prefill: int = 1, decode: int = 1, frontends: int = 1, gateways: int = 1, **overrides: Any
) -> AsyncIterator[Live]:
    """Everything started; stopped whatever happens. At a clean end nothing is in hand anywhere."""
    settings = {"perf__time_factor": 0.1, "prefill__max_batch_tokens": 2048, "timeouts__drain_s": 10.0}
    config = cluster_config("ds-27b", blocks, **{**settings, **overrides})
    scheduler = Scheduler(config, "scheduler")
    cluster = Cluster(config, scheduler)
    live = Live(cluster)
    try:
        await scheduler.start()
        control = config.scheduler.model_copy(update={"control": scheduler.node.endpoint})
        cluster.config = config.model_copy(update={"scheduler": control})
        roles = {"gateway": gateways, "prefill": prefill, "decode": decode, "frontend": frontends}
        await asyncio.gather(*(live.start(f"{kind}-{n}") for kind, count in roles.items() for n in range(count)))
        yield live
        await cluster.quiet()
        cluster.check_integrity()
    finally:
        for service in live.services:
            await service.stop(drain=False)


@dataclass(slots=True)
class Client:
    """Sends requests as a client behind a load balancer does: to the front ends in turn, to another one where nobody
    listens or takes on more. failed: what else came, in words."""

    live: Live
    http: httpx.AsyncClient
    sent: int = 0
    done: int = 0
    failed: list[str] = field(default_factory=list)

    async def ask(self, prompt: list[int], max_tokens: int, stream: bool) -> list[int]:
        """The answer; what is wrong with it is noted."""
        self.sent += 1
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        expected = expected_tokens(read_configured_model(self.live.config).vocab_size, prompt, max_tokens)
        try:
            async with asyncio.timeout(PATIENCE_S):
                tokens = await self._tokens(body, stream)
        except (httpx.HTTPError, TimeoutError, AssertionError) as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            return expected
        if tokens == expected:
            self.done += 1
        else:
            self.failed.append(f"{len(tokens)} tokens of {len(expected)}, or wrong ones")
        return expected

    async def _tokens(self, body: dict[str, Any], stream: bool) -> list[int]:
        turn = self.sent
        while True:
            urls = [frontend.url for frontend in self.live.frontends.values() if hasattr(frontend, "url")]
            turn += 1
            if urls:
                url = f"{urls[turn % len(urls)]}/v1/completions"
                try:
                    async with self.http.stream("POST", url, json={**body, "stream": stream}) as response:
                        text = (await response.aread()).decode()
                except httpx.ConnectError:
                    response = None
                if response is not None and not _sent_on(response.status_code, text):
                    assert response.status_code == 200, text
                    return _streamed(text) if stream else list(json.loads(text)["choices"][0]["token_ids"])
            await asyncio.sleep(AGAIN_S)

    async def load(self, workers: int, until: Callable[[], bool], seed: int = 1) -> None:
        """Requests of many lengths, one behind the other in each worker, until it is enough; each second one is the
        next turn of the one before."""
        rng = random.Random(seed)

        async def work() -> None:
            turn: list[int] = []
            while not until():
                new = [rng.randrange(1000) for _ in range(rng.choice([1, 63, 64, 65, 150, 300]))]
                prompt = turn + new
                answer = await self.ask(prompt, rng.choice([1, 2, 10, 40]), rng.random() < 0.5)
                turn = [] if turn else prompt + answer

        await asyncio.gather(*(work() for _ in range(workers)))


def _sent_on(status: int, text: str) -> bool:
    """Whether the front end takes nothing now, for a reason of its own: another one may."""
    return status in (429, 503) and json.loads(text)["error"]["code"] in ("draining", "overloaded")


def _streamed(text: str) -> list[int]:
    """AssertionError unless the stream has a good end."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", text[-300:]
    chunks = [json.loads(event) for event in events[:-1]]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@asynccontextmanager
async def client_of(live: Live) -> AsyncIterator[Client]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
        yield Client(live, http)


async def under_load(
    live: Live, change: Callable[[], Awaitable[None]], requests: int, workers: int = 8, after_s: float = 0.0
) -> Client:
    """At least so many requests, and as many as it takes while the cluster changes; the client tells what came."""
    changed = False

    async def changing() -> None:
        nonlocal changed
        await asyncio.sleep(after_s)
        try:
            await change()
        finally:
            changed = True

    async with client_of(live) as client, asyncio.TaskGroup() as group:
        group.create_task(changing())
        group.create_task(client.load(workers, lambda: changed and client.sent >= requests))
    return client
