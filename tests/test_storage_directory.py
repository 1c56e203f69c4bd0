"""Directory block store: the ordinary life of a block, atomic publication, failed puts."""

import asyncio
import errno
import os
import resource
import stat
import threading
from pathlib import Path

import pytest
import xxhash

from common.metrics import Metrics
from common.storage import directory as directory_module
from common.storage.format import HEADER_BYTES
from tests.storage_support import SIZE, file_of, get, key_of, names, opened, payload_of, put, quarantined

# ---- the ordinary life of a block ----


async def test_blocks_come_back_as_they_were_stored_also_after_a_restart(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        assert await asyncio.gather(*(put(store, f"b{i}") for i in range(40))) == [True] * 40
        assert await get(store, "absent") is None
    async with opened(tmp_path, metrics=metrics) as store:
        for i in range(40):
            assert await get(store, f"b{i}") == payload_of(f"b{i}")
        keys = [key_of("b3"), key_of("absent"), key_of("b7")]
        assert await store.exists(keys) == [True, False, True]
        assert await store.exists([]) == []
    values = metrics.snapshot()
    assert values["storage_blocks_written_total"] == values["storage_blocks_read_total"] == 40
    assert values["block_store_written_bytes_total"] == values["block_store_read_bytes_total"] == 40 * SIZE
    assert values["storage_misses_total"] == 1
    assert quarantined(metrics) == {}


async def test_storing_a_block_again_succeeds(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await asyncio.gather(*(put(store, "same") for _ in range(8))) == [True] * 8
        assert await get(store, "same") == payload_of("same")
        assert names(file_of(tmp_path, "same").parent) == [file_of(tmp_path, "same").name]
        assert names(tmp_path / "tmp") == []


async def test_files_are_private_and_names_have_a_fixed_length(tmp_path: Path) -> None:
    root = tmp_path / ("a long model path " * 10) / "blocks of it"
    async with opened(root) as store:
        assert await put(store, "block")
        assert await get(store, "block") == payload_of("block")
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert len(file_of(root, "block").name) == 64
    assert file_of(root, "block").stat().st_size == HEADER_BYTES + SIZE


async def test_a_buffer_of_the_wrong_size_is_the_callers_defect(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with pytest.raises(ValueError, match="bytes"):
            await store.read([key_of("x")], [memoryview(bytearray(SIZE - 1))])
        with pytest.raises(ValueError, match="bytes"):
            await store.write(key_of("x"), memoryview(bytes(SIZE + 1)), 0)


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    async with opened(tmp_path) as store:
        for i in range(10):
            await put(store, f"b{i}")
            await get(store, f"b{i}")
            await get(store, f"absent{i}")
            file_of(tmp_path, f"b{i}").write_bytes(b"")
            await get(store, f"b{i}")
    assert len(os.listdir("/proc/self/fd")) == len(before)


# ---- atomic publication ----


async def test_a_reader_sees_nothing_or_all_of_a_slow_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing, go_on = threading.Event(), threading.Event()
    publish = directory_module._publish

    def slow_publish(draft: str, path: str) -> None:
        publishing.set()
        assert go_on.wait(20)
        publish(draft, path)

    monkeypatch.setattr(directory_module, "_publish", slow_publish)
    async with opened(tmp_path) as writer, opened(tmp_path) as reader:
        storing = asyncio.create_task(put(writer, "slow"))
        assert await asyncio.to_thread(publishing.wait, 20)
        assert names(tmp_path / "tmp") != []
        assert await reader.exists([key_of("slow")]) == [False]
        assert await get(reader, "slow") is None
        go_on.set()
        seen = set()
        while not storing.done():
            seen.add(await get(reader, "slow"))
        assert await storing
        seen.add(await get(reader, "slow"))
        assert seen <= {None, payload_of("slow")} and payload_of("slow") in seen


async def test_readers_never_see_a_half_written_block(tmp_path: Path) -> None:
    """Many rewrites of one block under a polling reader: always one of the payloads, whole."""
    metrics = Metrics()
    payloads = [payload_of("one"), payload_of("two")]
    async with opened(tmp_path) as writer, opened(tmp_path, metrics=metrics) as reader:

        async def rewrite() -> None:
            for i in range(60):
                payload = payloads[i % 2]
                assert await writer.write(key_of("key"), memoryview(payload), xxhash.xxh3_64_intdigest(payload))

        writing = asyncio.create_task(rewrite())
        seen = []
        while not writing.done():
            into = memoryview(bytearray(SIZE))
            seen.append(bytes(into) if all(await reader.read([key_of("key")], [into])) else None)
        await writing
        found = [content for content in seen if content is not None]
        assert found and all(content in payloads for content in found)
        # once there, it is never away
        assert None not in seen[seen.index(found[0]) :]
    assert quarantined(metrics) == {}


async def test_a_cancelled_call_is_over_only_when_its_buffer_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()

    async with opened(tmp_path) as store:
        await put(store, "block")
        into = memoryview(bytearray(SIZE))
        real_open = store._open_block

        def slow_open(path: str, flags: int) -> int:
            started.set()
            assert go_on.wait(20)
            return real_open(path, flags)

        monkeypatch.setattr(store, "_open_block", slow_open)
        reading = asyncio.create_task(store.read([key_of("block")], [into]))
        assert await asyncio.to_thread(started.wait, 20)
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=0.05)
        assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert into == payload_of("block")  # the read went to its end, and the end came before the cancellation


# ---- failed puts ----


async def test_a_write_that_the_kernel_cuts_short_leaves_nothing(tmp_path: Path) -> None:
    """A file-size limit makes the kernel fail the write half-way, as a full disk does."""
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        assert await put(store, "before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + SIZE // 2, hard))
        try:
            assert not await put(store, "block")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert metrics.snapshot()["storage_failed_puts_total{error=EFBIG}"] == 1
        assert names(tmp_path / "tmp") == []
        assert await store.exists([key_of("block")]) == [False]
        assert await get(store, "before") == payload_of("before")
        assert await put(store, "block")
        assert await get(store, "block") == payload_of("block")


async def test_a_full_disk_at_publication_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: str, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    metrics = Metrics()
    monkeypatch.setattr(directory_module, "_publish", full)
    async with opened(tmp_path, metrics=metrics) as store:
        assert not await put(store, "block")
        assert names(tmp_path / "tmp") == []
        assert metrics.snapshot()["storage_failed_puts_total{error=ENOSPC}"] == 1


async def test_a_store_whose_blocks_are_deleted_under_it_recovers(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, "block")
        file_of(tmp_path, "block").unlink()
        file_of(tmp_path, "block").parent.rmdir()
        assert await get(store, "block") is None
        assert await put(store, "block")
        assert await get(store, "block") == payload_of("block")


async def test_the_loop_goes_on_while_storage_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that hang hold up neither the event loop nor lookups."""
    go_on = threading.Event()
    async with opened(tmp_path) as store:
        await put(store, "block")
        real_open = store._open_block

        def hang(path: str, flags: int) -> int:
            assert go_on.wait(20)
            return real_open(path, flags)

        monkeypatch.setattr(store, "_open_block", hang)
        reads = [asyncio.create_task(get(store, "block")) for _ in range(10)]
        async with asyncio.timeout(5):
            assert await store.exists([key_of("block")]) == [True]
        assert not any(read.done() for read in reads)
        go_on.set()
        assert await asyncio.gather(*reads) == [payload_of("block")] * 10
