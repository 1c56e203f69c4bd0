"""Stores that go wrong: wrong bytes, stalled writers, writers that leave, calls out of order."""

import asyncio
import time
from pathlib import Path

import pytest
import xxhash

from common.errors import DualPathError, ErrorCode
from common.messages import Announce, Commit, Match, ReadBlocks, Reserved
from services.storage_gateway.staging import Staging
from tests.gateway_harness import BLOCK, gateway_model, keys_of, payload_of, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_model(tmp_path_factory.mktemp("model"))


async def test_a_block_that_arrives_otherwise_than_sent_is_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        await tm.announce(["a", "b"])
        await tm.write(["a", "b"], await tm.reserve(["a", "b"]))
        right = xxhash.xxh3_64_intdigest(payload_of("a"))
        assert await tm.commit(["a", "b"], checksums=[right, 1]) == [True, False]
        assert world.metric("storage_refused_puts_total") == 1
        assert await tm.match(["a", "b"]) == 1
        assert await tm.announce(["a", "b"]) == [False, True]
        assert world.slots == (8, 0, 0)


async def test_results_are_aligned_when_single_blocks_fail(model: Path, tmp_path: Path) -> None:
    """Sixteen blocks, of which one is stored already and one cannot be written."""
    names = [f"b{i}" for i in range(16)]
    async with running(model, tmp_path, storage__staging=40 * BLOCK) as world:
        tm = await world.traffic_manager()
        await tm.store(["b5"])
        obstacle = world.file("b9").parent
        assert not obstacle.exists()
        obstacle.write_text("a file in the place of b9's sub-directory")
        wanted = await tm.announce(names)
        assert wanted == [i != 5 for i in range(16)]
        sent = [name for name, want in zip(names, wanted, strict=True) if want]
        await tm.write(sent, await tm.reserve(sent))
        assert await tm.commit(sent) == [name != "b9" for name in sent]
        assert await tm.match(names) == 9
        assert await tm.match(names[10:]) == 6
        obstacle.unlink()
        assert await tm.store(names) == [True]
        assert await tm.match(names) == 16


async def test_a_writer_that_leaves_gives_back_its_places(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        names = list(range(8))
        await tm.announce(names)
        await tm.reserve(names)
        assert world.slots == (0, 8, 0)
        waiting = asyncio.create_task(other.store(["x"]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await world.leave(tm)
        assert await waiting == [True]
        assert world.slots == (8, 0, 0)
        for call in (tm.announce(["y"]), tm.reserve(names)):
            with pytest.raises(DualPathError) as caught:
                await call
            assert caught.value.code is ErrorCode.ENGINE_LOST
        assert await other.store(names) == [True] * 8


async def test_a_stalled_writers_places_are_quarantined_until_it_is_known_to_be_quiet(
    model: Path, tmp_path: Path
) -> None:
    async with running(model, tmp_path, timeouts__store_s=0.3) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.announce(["a", "b"])
        reserved = await tm.reserve(["a", "b"])
        await asyncio.sleep(0.35)
        # others go on, in other places, and their reads are not affected
        assert await other.store(["a"]) == [True]
        assert world.slots == (6, 0, 2)
        assert await other.read(["a"]) == [True]
        # too late, but now the writer is known to be done with one place
        await tm.write(["a"], Reserved(reserved.target, reserved.offsets[:1]))
        assert await tm.commit(["a"]) == [False]
        assert world.slots == (7, 0, 1)
        await world.leave(tm)
        assert world.slots == (8, 0, 0)


async def test_a_stalled_writer_gets_no_second_place_until_it_has_committed(model: Path, tmp_path: Path) -> None:
    """It announces the block again for another request, while its first transfer may still arrive; giving that up must
    not set the place free, and the second announcement must not lapse a second time."""
    async with running(model, tmp_path, timeouts__store_s=0.3) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        await tm.announce(["a"])
        await tm.reserve(["a"])
        await asyncio.sleep(0.35)
        assert await other.match([]) == 0
        assert world.slots == (7, 0, 1)
        assert await tm.announce(["a", "b", "a"]) == [False, True, False]
        assert len(world.gateway.in_flight) == 1
        await asyncio.sleep(0.35)
        assert await other.match([]) == 0
        assert world.slots == (7, 0, 1)
        assert await other.store(["a"]) == [True]
        assert await tm.commit(["a"], ok=[False]) == [False]
        assert world.slots == (8, 0, 0)


async def test_places_are_given_in_order_and_not_for_ever(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, timeouts__store_s=0.5) as world:
        tm = await world.traffic_manager()
        await tm.announce([*range(8), "first", "second", "third"])
        await tm.reserve(list(range(8)))
        first = asyncio.create_task(tm.reserve(["first"]))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(tm.reserve(["second"]))
        await asyncio.sleep(0.02)
        await tm.commit([3], ok=[False])
        await first
        assert not second.done()
        start = time.monotonic()
        with pytest.raises(DualPathError, match="no staging within") as caught:
            await second
        assert caught.value.code is ErrorCode.STORAGE_FAILED
        assert time.monotonic() - start < 3
        await world.leave(tm)


async def test_a_reservation_larger_than_staging_is_filled_in_part(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, storage__staging=6 * BLOCK) as world:
        tm = await world.traffic_manager()
        await tm.announce(list(range(10)))
        assert len((await tm.reserve(list(range(10)))).offsets) == 3
        await tm.commit(list(range(3)), ok=[False] * 3)


async def test_calls_out_of_order_are_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm, other = await world.traffic_manager("tm"), await world.traffic_manager("other")
        with pytest.raises(DualPathError, match="not announced"):
            await tm.reserve(["a"])
        await tm.announce(["a", "b"])
        with pytest.raises(DualPathError, match="not announced"):
            await other.reserve(["a"])
        reserved = await tm.reserve(["a"])
        for names in (["a"], ["b", "b"]):
            with pytest.raises(DualPathError, match="has a place already") as caught:
                await tm.reserve(names)
            assert caught.value.code is ErrorCode.MALFORMED
        assert await other.commit(["a"]) == [False]  # not other's to commit: nothing happens
        await tm.write(["a"], reserved)
        assert await tm.commit(["a"]) == [True]
        assert await tm.commit(["a"]) == [False]  # once only
        await tm.commit(["b"], ok=[False])


async def test_malformed_calls_are_refused(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as world:
        tm = await world.traffic_manager()
        for call in (
            Match(b"short"),
            ReadBlocks("r", keys_of(["a"]), tm.region, []),
            Commit(tm.incarnation, keys_of(["a"]), [True, True], [0]),
            Announce(tm.incarnation, b"x" * 33),
        ):
            with pytest.raises(DualPathError) as caught:
                await tm.link.call(call, 5)
            assert caught.value.code is ErrorCode.MALFORMED


async def test_a_lane_lets_nobody_overtake() -> None:
    """However little the next one wants: else whoever wants much would wait for ever."""
    staging = Staging(8, 1)
    try:
        held = await staging.stores.take(3, 3)
        large = asyncio.create_task(staging.stores.take(3, 3))
        await asyncio.sleep(0)
        small = asyncio.create_task(staging.stores.take(1, 1))
        await asyncio.sleep(0.01)
        assert not large.done() and not small.done()
        gone = asyncio.create_task(staging.stores.take(1, 1))
        await asyncio.sleep(0)
        gone.cancel()
        staging.stores.give_back(held)
        assert len(await large) == 3 and len(await small) == 1
        staging.check_integrity()
        assert staging.stores.pool.num_used == 4
    finally:
        staging.close()
