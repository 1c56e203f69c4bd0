"""What the scheduler says once: it arrives also where a connection, a port or a moment is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import DualPathError, ErrorCode
from common.faults import Fault
from common.messages import MemberJoined, MemberLeaving, MemberLeft, ReadBlocks
from common.rpc import Peer
from common.service import Service
from common.types import ReadPath, Role, Sampling
from services.storage_gateway.service import StorageGateway
from services.traffic_manager.store import ReadOutcome
from tests.cluster import cluster_config, random_prompt, run_cluster
from tests.lifecycle_harness import Live, client_of, live_cluster

SHORT = {"timeouts__heartbeat_s": 0.2, "timeouts__heartbeat_timeout_s": 3.0}


def lost_once(live: Live, kind: type) -> list[bytes]:
    """Each member's first message of this kind cannot be sent; whose that has happened to."""
    node, struck = live.cluster.scheduler.node, []  # type: ignore[var-annotated]
    send = node.send_to

    def send_to(identity: bytes, msg: object) -> None:
        if isinstance(msg, kind) and identity not in struck:
            struck.append(identity)
            raise DualPathError(ErrorCode.UNREACHABLE, "as the test says")
        send(identity, msg)

    node.send_to = send_to  # type: ignore[method-assign]
    return struck


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_failure_that_cannot_be_told_at_once_is_told_again(tmp_path: Path) -> None:
    """Else the client waits until its request's deadline."""
    fault = Fault(point="message", action="fail", type="RequestFailed", process="scheduler")
    async with live_cluster(tmp_path, decode=2, faults=[fault], perf__time_factor=1.0) as live:
        scheduler = live.cluster.scheduler
        async with client_of(live) as client:
            asking = asyncio.create_task(client.ask([1] * 100, 40, stream=True))
            await until(lambda: any(live.cluster.decode(number)._running for number in range(2)))
            [number] = [number for number in range(2) if live.cluster.decode(number)._running]
            engine = live.cluster.decode(number)
            await live.kill(engine.name)
            scheduler._remove(engine.incarnation, "as the test says")
            async with asyncio.timeout(20):
                await asking
        assert client.failed == [] and sum(live.retries().values()) == 1


async def test_news_of_members_that_cannot_be_told_at_once_are_told_again(tmp_path: Path) -> None:
    async with live_cluster(tmp_path) as live:
        joined, leaving, left = (lost_once(live, kind) for kind in (MemberJoined, MemberLeaving, MemberLeft))
        await live.start("decode-1")
        new = live.cluster.decode(1).incarnation
        others: list[Service] = [live.frontends["frontend-0"], live.cluster.prefill(), live.cluster.decode(0)]
        assert {other.incarnation.encode() for other in others} <= set(joined)
        await until(lambda: all(new in other.members for other in others))
        stopping = asyncio.create_task(live.stop("decode-1"))
        await until(lambda: all(new not in other.members for other in others))
        await stopping
        assert leaving and {other.incarnation.encode() for other in others} <= set(left)


async def test_who_joins_learns_who_is_leaving(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, gateways=2) as live:
        leaving, release = live.gateways["gateway-0"], asyncio.Event()
        leaving.drain = release.wait  # type: ignore[method-assign,assignment]
        stopping = asyncio.create_task(live.stop("gateway-0"))
        await until(lambda: leaving.incarnation in live.cluster.scheduler.leaving)
        await live.start("decode-1")
        try:
            manager = live.cluster.traffic_managers["decode-1"]
            await until(lambda: leaving.incarnation in manager.leaving)
        finally:
            release.set()
            await stopping


async def test_a_gateway_may_get_the_port_of_one_that_died(tmp_path: Path) -> None:
    """Giving up the dead one later closes no link to it, and ends no scheduler."""
    async with live_cluster(tmp_path, **SHORT) as live:
        port = live.gateways["gateway-0"].node.endpoint

        class There(StorageGateway):
            control = port

        await live.kill("gateway-0")
        live.gateways["gateway-1"] = There(live.config, "gateway-1")
        await live.gateways["gateway-1"].start()
        registry = live.cluster.scheduler.registry
        await until(lambda: all(member.name != "gateway-0" for member in registry.all()))
        async with client_of(live) as client:
            await client.ask([1] * 100, 4, stream=True)
        assert client.failed == [] and live.cluster.scheduler.failure is None
        assert live.cluster.traffic_managers["decode-0"].node.link(port)


async def test_a_read_from_one_that_died_ends_also_where_another_has_its_port(tmp_path: Path) -> None:
    """Its slots are in doubt for as long as nobody knows that no answer comes."""
    async with live_cluster(tmp_path, **SHORT) as live:
        port, asked = live.gateways["gateway-0"].node.endpoint, asyncio.Event()

        class There(StorageGateway):
            control = port

        async def silent(msg: ReadBlocks, peer: Peer) -> None:
            asked.set()
            await asyncio.Event().wait()

        live.gateways["gateway-0"].node._handlers[ReadBlocks] = silent
        manager = live.cluster.traffic_managers["prefill-0"]
        reading = asyncio.create_task(manager._store.read("one", ReadPath.PE, [bytes(32)], [0]))
        await asked.wait()
        await live.kill("gateway-0")
        live.gateways["gateway-1"] = There(live.config, "gateway-1")
        await live.gateways["gateway-1"].start()
        new = live.gateways["gateway-1"].incarnation
        await until(lambda: list(manager.members_of(Role.STORAGE_GATEWAY)) == [manager.members.get(new)])
        async with asyncio.timeout(5):
            doubt = (await reading).doubt
            assert doubt is not None
            await doubt
        assert await manager._store.read("two", ReadPath.PE, [bytes(32)], [0]) == ReadOutcome(0)


async def test_news_wait_for_a_member_until_it_is_given_up(tmp_path: Path) -> None:
    """Who cannot be reached for longer than a call may take, but lives, does not take the dead for alive afterwards."""
    async with live_cluster(tmp_path, gateways=2, timeouts__call_s=0.2, timeouts__heartbeat_s=0.2) as live:
        node, frontend = live.cluster.scheduler.node, live.frontends["frontend-0"]
        send, away = node.send_to, True

        def send_to(identity: bytes, msg: object) -> None:
            if away and identity == frontend.incarnation.encode():
                raise DualPathError(ErrorCode.UNREACHABLE, "as the test says")
            send(identity, msg)

        node.send_to = send_to  # type: ignore[method-assign]
        gone = live.gateways["gateway-0"].incarnation
        await live.stop("gateway-0")
        await asyncio.sleep(1.0)
        away = False
        assert live.cluster.scheduler.registry.get(frontend.incarnation) is not None
        async with asyncio.timeout(2):
            while gone in frontend.members:
                await asyncio.sleep(0.02)


async def test_who_has_left_does_not_register_again(tmp_path: Path) -> None:
    """A process that ends while a new scheduler comes: its last word is that it has left."""
    async with live_cluster(tmp_path, gateways=2, **SHORT) as live:
        gateway = live.gateways["gateway-0"]
        await live.kill("scheduler")
        await until(lambda: gateway._enrolment is not None and gateway._enrolment.alone_since is not None)
        silence = gateway.node.silence

        async def slow() -> None:
            gateway.node.silence = silence  # type: ignore[method-assign]
            await live.start("scheduler")
            await until(lambda: len(live.cluster.scheduler.registry.all()) >= 6)
            await asyncio.sleep(1.0)
            await silence()

        gateway.node.silence = slow  # type: ignore[method-assign]
        del live.gateways["gateway-0"]
        await gateway.stop(drain=False)
        assert live.cluster.scheduler.registry.get(gateway.incarnation) is None


async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(model: Path, tmp_path: Path) -> None:
    config = cluster_config(model, tmp_path, timeouts__engines_s=60.0)
    async with run_cluster(config, prefill=0, decode=0) as cluster:
        driver, scheduler = cluster.driver, cluster.scheduler
        assert driver is not None
        request = driver.request(random_prompt(1, 300), Sampling(5))
        await driver.submit(request)
        assert [task for task in scheduler._tasks if "look up" in task.get_name()]
        driver.cancel(request)
        await until(lambda: not any("look up" in task.get_name() for task in scheduler._tasks))


async def test_nothing_is_insisted_on_after_the_end(model: Path, tmp_path: Path) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    config = cluster_config(
        model, tmp_path / "blocks", scheduler__record=str(tmp_path / "record"), timeouts__call_s=0.5,
        faults=[Fault(point="message", action="fail", type="Assign", times=0)],
    )  # fmt: skip
    async with run_cluster(config, driver=True) as cluster:
        driver, scheduler = cluster.driver, cluster.scheduler
        assert driver is not None
        await driver.submit(driver.request(random_prompt(1, 100), Sampling(5)))
        await until(lambda: scheduler.policy.num_running == 1)
        await scheduler.stop(drain=False)
        await asyncio.sleep(1.0)
        assert problems == []
        scheduler.policy.requests.clear()
