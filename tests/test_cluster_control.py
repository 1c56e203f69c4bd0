"""The control plane of a whole cluster: admission, keys, hostile frames, and decisions that can be replayed."""

from __future__ import annotations

import asyncio
import pickle
import random
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
import zmq.auth

from common.errors import ConfigError, DualPathError, ErrorCode
from common.faults import Fault
from common.messages import GetStatus, Member, Register, Status
from common.types import Role
from common.wire import PROTOCOL_VERSION
from services.decode.service import DecodeEngine
from services.engine.torch_backend.reference import Reference
from services.scheduler.policy import Policy
from services.scheduler.service import Scheduler
from services.storage_gateway.service import StorageGateway
from tests.cluster import Driver, cluster_config, run_cluster
from tests.models import tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(models):
    return tiny_model(models, "llama")


async def no_traffic_manager() -> str:
    raise AssertionError("a refused engine starts nothing")


async def test_replayed_events_give_the_same_actions(model, tmp_path):
    """A logged live run, fed to a fresh policy, decides alike (design: decisions are pure)."""
    log = []
    async with run_cluster(cluster_config(model, tmp_path), prefill=2, decode=2, driver=False) as cluster:
        live = cluster.scheduler.policy
        original = Policy.handle
        # the engines have joined already: a fresh policy gets to know them from the log as well
        fresh = cluster.scheduler.policy = Policy(live.config)
        for engine in cluster.engines.values():
            member = cluster.scheduler.registry.get(engine.incarnation)
            event = cluster.scheduler._joined(member)
            log.append((event, 0.0, original(fresh, event, 0.0)))

        def logged(self, event, now):
            actions = original(self, event, now)
            log.append((event, now, actions))
            return actions

        Policy.handle = logged
        try:
            cluster.driver = Driver(cluster.config, "driver")
            await cluster.driver.start()
            rng = random.Random(1)
            base = [rng.randrange(3, 500) for _ in range(200)]
            await asyncio.gather(*(cluster.driver.generate(base[: 50 + 10 * n], 5) for n in range(12)))
            request = cluster.driver.request(base, replace_sampling())
            await cluster.driver.submit(request)
            cluster.driver.cancel(request)
            await cluster.quiet()
        finally:
            Policy.handle = original
    assert sum(len(actions) for _, _, actions in log) >= 12
    again = Policy(live.config)
    assert [again.handle(event, now) for event, now, _ in log] == [actions for _, _, actions in log]


def replace_sampling():
    from common.types import Sampling

    return Sampling(40, ignore_eos=True)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("geometry.block_size", {"model.block_size": 32}),
        ("geometry.parts", {"model.dtype": "bfloat16"}),
        ("model_digest", {"seed": 1}),
    ],
)
async def test_mismatched_engines_are_refused_by_name(models, model, tmp_path, field, change):
    """A32: another block size, KV dtype or model revision never gets as far as a request."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        other = tiny_model(models, "llama", seed=change.get("seed", 0))
        settings = {name: value for name, value in change.items() if name != "seed"}
        config = cluster_config(other, tmp_path, **{"scheduler.control": cluster.config.scheduler.control}, **settings)
        gateway = StorageGateway(config.model_copy(update={"storage": _elsewhere(config, tmp_path)}), "gateway-1")
        try:
            with pytest.raises(ConfigError, match=field):
                await gateway.start()
        finally:
            await gateway.stop(drain=False)
        assert (await cluster.driver.generate([7] * 70, 2)).finished is not None


def _elsewhere(config, tmp_path):
    return config.storage.model_copy(update={"path": str(tmp_path / "other")})


async def test_other_protocol_versions_are_refused(model, tmp_path):
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        member = Member(Role.FRONTEND, "old", "old.1", "tcp://127.0.0.1:1", "n", 1)
        with pytest.raises(DualPathError, match="protocol") as caught:
            await cluster.driver.scheduler.call(Register(PROTOCOL_VERSION + 1, member), 5.0)
        assert caught.value.code is ErrorCode.MISMATCH


async def test_a_restarted_process_replaces_its_old_self(model, tmp_path):
    """C10, A16: the same name with a new incarnation; requests of the old one fail at once."""
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        old = cluster.scheduler.registry.of(Role.DECODE)[0]
        new = replace(old, incarnation=f"{old.name}.new")
        await cluster.driver.scheduler.call(Register(PROTOCOL_VERSION, new), 5.0)
        assert [member.incarnation for member in cluster.scheduler.registry.of(Role.DECODE)] == [new.incarnation]
        async with asyncio.timeout(5):
            await cluster.decode().failed.wait()
        cluster.engines["decode-0"]._sequences.clear()
        cluster.decode().failure = None  # as it should


async def test_status_lists_every_process_with_its_counters(model, tmp_path):
    config = cluster_config(model, tmp_path, timeouts__heartbeat_s=0.1)
    async with run_cluster(config, decode=2) as cluster:
        await cluster.driver.generate([7] * 130, 2)
        await asyncio.sleep(0.4)
        status: Status = await cluster.driver.scheduler.call(GetStatus(), 5.0)
        roles = sorted(entry.member.role for entry in status.members)
        single = ["scheduler", "storage-gateway", "frontend", "prefill"]
        assert roles == sorted([*single, "decode", "decode", *["traffic-manager"] * 3])
        nodes = {entry.member.node for entry in status.members if entry.member.role is Role.TRAFFIC_MANAGER}
        assert nodes == {"prefill-0", "decode-0", "decode-1"}
        assert all("event_loop_lag_seconds" in entry.counters for entry in status.members)


class _Gadget:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


async def test_hostile_frames_are_counted_and_nothing_else(model, tmp_path):
    """F01, F08: pickle gadgets, half messages and nests of arrays at every control socket of every role."""
    marker = tmp_path / "marker"
    gadget = pickle.dumps(_Gadget(marker))
    context = zmq.asyncio.Context.instance()
    async with run_cluster(cluster_config(model, tmp_path / "blocks")) as cluster:
        for service in cluster.services:
            socket = context.socket(zmq.DEALER)
            socket.connect(service.node.endpoint)
            frames = [[gadget], [b"M", b"", gadget], [b"C", b"1", b"\x91" * 50_000], [b"?", b"", b""], [b"M", b"", b""]]
            for parts in [*frames, [b"M"] * 50, [b"C", b"", b"\x92\xa6Submit\x80"]]:
                await socket.send_multipart(parts)
            await asyncio.sleep(0.1)
            dropped = service.metrics.snapshot().get("messages_dropped_total{reason=malformed}", 0)
            assert dropped == 7, service.name
            socket.close(0)
        assert not marker.exists()
        assert (await cluster.driver.generate([7] * 70, 2)).finished is not None


async def test_cluster_with_curve_keys(model, tmp_path):
    """With keys the whole cluster runs encrypted, and a peer without them is not heard."""
    keys = tmp_path / "keys"
    keys.mkdir()
    zmq.auth.create_certificates(keys, "cluster")
    config = cluster_config(model, tmp_path / "blocks", security__curve_dir=str(keys))
    prompt = [7 + n % 300 for n in range(150)]
    async with run_cluster(config, decode=2) as cluster:
        assert (await cluster.driver.generate(prompt, 4)).tokens == Reference(model).greedy(prompt, 4)
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.connect(cluster.scheduler.node.endpoint)
        await socket.send_multipart([b"M", b"", b"junk"])
        await asyncio.sleep(0.2)
        assert not cluster.scheduler.metrics.snapshot().get("messages_dropped_total{reason=malformed}")
        socket.close(0)


def test_other_addresses_than_loopback_need_keys(model, tmp_path):
    """F02: nothing listens beyond this host by accident."""
    for name in ("network__host", "network__snic", "network__cnic"):
        with pytest.raises(ConfigError, match=r"curve_dir"):
            cluster_config(model, tmp_path, **{name: "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"scheduler\.control|curve_dir"):
        cluster_config(model, tmp_path, scheduler__control="tcp://10.1.2.3:5700")


async def test_ipv6(model, tmp_path):
    """D08: the whole system on ::1."""
    hosts = {f"network__{name}": "::1" for name in ("host", "snic", "cnic")}
    config = cluster_config(model, tmp_path, scheduler__control="tcp://[::1]:*", network__transport="tcp", **hosts)
    prompt = [7 + n % 300 for n in range(150)]
    async with run_cluster(config) as cluster:
        for _ in range(2):
            assert (await cluster.driver.generate(prompt, 4)).tokens == Reference(model).greedy(prompt, 4)


async def test_an_engine_that_cannot_hold_a_block_of_context_says_so(model, tmp_path):
    async with run_cluster(cluster_config(model, tmp_path)) as cluster:
        config = cluster.config.model_copy(
            update={"decode": cluster.config.decode.model_copy(update={"device_memory": 1000})}
        )
        engine = DecodeEngine(config, "decode-9", no_traffic_manager)
        try:
            with pytest.raises(ConfigError, match=r"decode\.device_memory"):
                await engine.start()
        finally:
            await engine.stop(drain=False)


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_unusable_curve_keys_are_one_clear_line(model, tmp_path, content):
    """And nothing hangs: neither the service that does not start, nor its end."""
    if content is not None:
        (tmp_path / "cluster.key_secret").write_text(content)
    with pytest.raises(ConfigError, match=r"security\.curve_dir: .*cluster\.key_secret"):
        Scheduler(cluster_config(model, tmp_path / "blocks", security__curve_dir=str(tmp_path)), "scheduler")


async def test_an_address_beyond_loopback_is_refused_without_keys_and_nothing_hangs(model, tmp_path):
    config = cluster_config(model, tmp_path)
    node = Scheduler(config, "scheduler").node
    with pytest.raises(ConfigError, match="curve_dir"):
        await node.bind("tcp://10.9.8.7:*")
    async with asyncio.timeout(5):
        await node.close()


@pytest.mark.parametrize("name", ["decode-1", "decode-1.tm"])
async def test_a_process_that_the_scheduler_cannot_hear_ends_itself(model, tmp_path, name):
    """Its peers it could still reach; they rely on its end. The others go on."""
    fault = Fault(point="message", action="drop", type="Heartbeat", process=name, times=0)
    config = cluster_config(
        model, tmp_path, timeouts__heartbeat_s=0.1, timeouts__heartbeat_timeout_s=1.5, faults=[fault]
    )
    async with run_cluster(config, decode=2) as cluster:
        cut_off = cluster.traffic_managers["decode-1"] if name.endswith(".tm") else cluster.engines["decode-1"]
        async with asyncio.timeout(10):
            await cut_off.failed.wait()
        engine, manager = cluster.engines.pop("decode-1"), cluster.traffic_managers.pop("decode-1")
        for service in (engine, manager):
            await service.stop(drain=False)
        assert (await cluster.driver.generate([7] * 70, 2)).finished is not None
