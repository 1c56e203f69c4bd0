"""Directory block store: atomic publication, verified reads, quarantine, failed puts."""

import asyncio
import errno
import os
import resource
import stat
import threading
from collections.abc import Callable
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


# ---- damage ----


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[position] ^= 1
        path.write_bytes(raw)

    return damage


def truncate(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def link(path: Path) -> None:
    """A symbolic link to a perfectly good copy is still not followed."""
    path.rename(path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def subdirectory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_block(path: Path) -> None:
    """The good file of another block under this one's name."""
    other = file_of(path.parents[2], "other")
    path.write_bytes(other.read_bytes())


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (flip(0), "header"),
    "version": (flip(8), "header"),
    "namespace": (flip(12), "header"),
    "key": (flip(44), "header"),
    "geometry": (flip(76), "header"),
    "payload length": (flip(88), "header"),
    "payload checksum": (flip(96), "header"),
    "header padding": (flip(2000), "header"),
    "header checksum": (flip(HEADER_BYTES - 1), "header"),
    "first payload byte": (flip(HEADER_BYTES), "checksum"),
    "middle payload byte": (flip(HEADER_BYTES + SIZE // 2), "checksum"),
    "last payload byte": (flip(HEADER_BYTES + SIZE - 1), "checksum"),
    "empty": (truncate(0), "size"),
    "inside the header": (truncate(100), "size"),
    "header only": (truncate(HEADER_BYTES), "size"),
    "half a payload": (truncate(HEADER_BYTES + SIZE // 2), "size"),
    "one byte short": (truncate(HEADER_BYTES + SIZE - 1), "size"),
    "one byte long": (append, "size"),
    "symbolic link": (link, "ELOOP"),
    "pipe": (pipe, "size"),
    "directory": (subdirectory, "size"),
    "another block": (other_block, "foreign"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_block_is_a_miss_set_aside_and_counted(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        await put(store, "other")
        damage(file_of(tmp_path, "block"))
        assert await get(store, "block") is None
        assert quarantined(metrics) == {reason: 1}
        assert metrics.snapshot()["storage_misses_total"] == 1
        assert names(tmp_path / "quarantine") == [key_of("block").hex()]
        assert await store.exists([key_of("block"), key_of("other")]) == [False, True]
        # the rest is fine, the store goes on, and the block can be stored again
        assert await get(store, "other") == payload_of("other")
        assert await get(store, "block") is None
        assert quarantined(metrics) == {reason: 1}
        assert await put(store, "block")
        assert await get(store, "block") == payload_of("block")


async def test_bad_blocks_of_a_batch_do_not_touch_the_others(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        stored = [f"b{i}" for i in range(6)]
        for name in stored:
            await put(store, name)
        flip(HEADER_BYTES)(file_of(tmp_path, "b1"))
        truncate(100)(file_of(tmp_path, "b4"))
        wanted = [*stored[:3], "absent", *stored[3:]]
        into = [memoryview(bytearray(SIZE)) for _ in wanted]
        found = await store.read([key_of(name) for name in wanted], into)
        assert found == [True, False, True, False, True, False, True]
        assert all(view == payload_of(name) for name, view, ok in zip(wanted, into, found, strict=True) if ok)
        assert quarantined(metrics) == {"checksum": 1, "size": 1}
        assert metrics.snapshot()["storage_misses_total"] == 3
        assert metrics.snapshot()["block_store_read_bytes_total"] == 4 * SIZE
        assert await store.read([], []) == []


@pytest.mark.parametrize("most", [1000, HEADER_BYTES, HEADER_BYTES + 77, HEADER_BYTES + SIZE - 1])
async def test_reads_that_the_kernel_cuts_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """They go on where they were."""
    metrics = Metrics()
    real_preadv = os.preadv

    def short(fd: int, buffers: list[bytearray | memoryview], offset: int) -> int:
        whole = bytearray(most)
        got = real_preadv(fd, [whole], offset)
        rest = memoryview(whole)[:got]
        for buffer in buffers:
            part = min(len(rest), len(buffer))
            buffer[:part] = rest[:part]
            rest = rest[part:]
        return got - len(rest)

    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        monkeypatch.setattr(os, "preadv", short)
        assert await get(store, "block") == payload_of("block")
    assert quarantined(metrics) == {}


async def test_a_file_that_shrinks_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    real_preadv = os.preadv

    def shrink(fd: int, buffers: list[memoryview], offset: int) -> int:
        truncate(HEADER_BYTES + 10)(file_of(tmp_path, "block"))
        return real_preadv(fd, buffers, offset)

    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        monkeypatch.setattr(os, "preadv", shrink)
        assert await get(store, "block") is None
    assert quarantined(metrics) == {"short": 1}


async def test_a_file_of_the_wrong_size_is_not_offered_as_a_hit(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, "block")
        truncate(HEADER_BYTES)(file_of(tmp_path, "block"))
        assert await store.exists([key_of("block")]) == [False]
        assert await put(store, "block")
        assert await store.exists([key_of("block")]) == [True]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
async def test_an_unreadable_file_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")

        def refuse(path: str, flags: int) -> int:
            raise OSError(code, os.strerror(code), path)

        monkeypatch.setattr(store, "_open_block", refuse)
        assert await get(store, "block") is None
        assert quarantined(metrics) == {errno.errorcode[code]: 1}
        assert not file_of(tmp_path, "block").exists()


async def test_trouble_of_our_own_does_not_condemn_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")

        def too_many_files(path: str, flags: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(store, "_open_block", too_many_files)
            assert await get(store, "block") is None
        assert quarantined(metrics) == {}
        assert await get(store, "block") == payload_of("block")


async def test_many_readers_of_a_damaged_block_count_it_once(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        flip(HEADER_BYTES + 5)(file_of(tmp_path, "block"))
        assert await asyncio.gather(*(get(store, "block") for _ in range(8))) == [None] * 8
        assert quarantined(metrics) == {"checksum": 1}


async def test_without_verification_a_damaged_payload_comes_as_it_is(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics, verify=False) as store:
        await put(store, "block")
        flip(HEADER_BYTES + 5)(file_of(tmp_path, "block"))
        content = await get(store, "block")
        assert content is not None and content != payload_of("block")
        assert content[5] ^ 1 == payload_of("block")[5]
        # its header still has to be right
        flip(44)(file_of(tmp_path, "block"))
        assert await get(store, "block") is None
        assert quarantined(metrics) == {"header": 1}


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
